"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

from ddpdiag.cli import complain
from ddpdiag.cli.manual import code_of, manual_page
from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import ExplainOptions, is_one_file, show, terminal
from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.explain.tally import STANDARD_INPUT
from ddpdiag.render import files

_CODE = re.compile(r"[A-Za-z][A-Za-z0-9]{2}\d{3}(\..*)?")
# What logs are called.
_SUFFIXES = (".out", ".log", ".err", ".txt")
_PIECE_BYTES = 1 << 18
_AS_TEXT = ExplainOptions()


def run(words: Sequence[str], how: ExplainOptions = _AS_TEXT) -> int:
    """Print what explains `words`; 3 where a text or log has no known failure."""
    text = " ".join(words)
    if how.json is not None:
        _check_output(how.json, words)
    if len(words) == 1 and (code := text if _CODE.fullmatch(text) else code_of(text)) is not None:
        if how.json is not None or how.github:
            option = "--github" if how.json is None else "--json"
            raise UsageError(f"{option}: {readable(text)} is a manual page; give an error text or a log")
        _show_page(code, how.color)
        return ExitCode.FIT
    if all(map(_is_log, words)):
        return _show([_explained(word, quiet=how.quiet) for word in words], how)
    if any(map(_is_log, words)) and (missing := [word for word in words if _is_missing_log(word)]):
        raise UsageError(f"{readable(missing[0])}: no such file")
    return _text(text, how)


def _is_log(word: str) -> bool:
    return word == "-" or os.path.isfile(word)


def _is_missing_log(word: str) -> bool:
    return not _is_log(word) and ("/" in word or word.endswith(_SUFFIXES))


def _check_output(path: str, words: Sequence[str]) -> None:
    """UsageError over what is read, and over a log that was given to --json by mistake."""
    files.check_writable(path)
    if path == files.STANDARD_OUTPUT:
        return
    if any(is_one_file(path, word) for word in words):
        raise UsageError(f"--json {path} would overwrite the log that is read; give it another file")
    with suppress(OSError), open(path, "rb") as file:
        if os.path.isfile(path) and file.read(1) not in (b"", b"{"):
            raise UsageError(f"--json {path} would overwrite a file that is no JSON; `--json -` is standard output")


def _explained(word: str, *, quiet: bool) -> Explanation:
    if word == "-":
        return explain_log(_standard_input(quiet=quiet), STANDARD_INPUT)
    return explain_log(_file(word), readable(word))


def _text(text: str, how: ExplainOptions) -> int:
    # Pasted text is a log without a name: the numbers of its lines are of no use.
    found = explain_log([text.encode("utf-8", "surrogateescape")], "")
    if not found.sightings and not re.search(r"\s", text.strip()):
        if _is_missing_log(text):
            raise UsageError(f"{readable(text)}: no such file")
        raise UsageError(
            f"{readable(text)!r} is not a code, not the name of a check and not a known error text; "
            "`ddpdiag checks` lists codes and names"
        )
    exit_code = _show([found], how)
    if found.is_explained and how == ExplainOptions(quiet=how.quiet, color=how.color):
        _show_page(found.sightings[0].card.code, how.color, "\n")
    return exit_code


def _show(found: Sequence[Explanation], how: ExplainOptions) -> int:
    """Each log under its name. The exit code is that of the worst."""
    from ddpdiag.explain.formats import as_github, as_json
    from ddpdiag.explain.render import render  # rich, which the page of a code does not need

    exit_code = ExitCode.FIT if all(each.is_explained for each in found) else ExitCode.UNKNOWN
    stream = sys.stderr if how.json == files.STANDARD_OUTPUT else sys.stdout
    width, color = terminal(stream, how.color)
    if how.json is not None:
        files.write(how.json, as_json(found, exit_code))
    pages = (render(each, width=width, color=color) for each in found)
    show(as_github(found) if how.github else "\n".join(pages), stream)
    return exit_code


def _show_page(code: str, when: Color, before: str = "") -> None:
    width, color = terminal(sys.stdout, when)
    show(before + manual_page(code, width=width, color=color), sys.stdout)


def _standard_input(*, quiet: bool) -> Iterator[bytes]:
    if sys.stdin is None:
        raise UsageError("standard input is closed; give the log's name, or pipe the log in")
    if sys.stdin.isatty() and not quiet:
        complain("reading the log from the terminal; end it with Ctrl-D")
    try:
        yield from _pieces(sys.stdin.buffer)
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror or error}") from error


def _file(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from _pieces(file)
    except OSError as error:
        raise UsageError(f"cannot read {readable(path)}: {error.strerror or error}") from error


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece
