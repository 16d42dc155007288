"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress

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
        names = {word: STANDARD_INPUT if word == "-" else readable(word) for word in words}
        return _show([explain_log(_pieces(word, quiet=how.quiet), names[word]) for word in words], how)
    if any(map(_is_log, words)) and (missing := [word for word in words if _is_missing_log(word)]):
        raise UsageError(f"{readable(missing[0])}: no such file")
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


def _show(found: Sequence[Explanation], how: ExplainOptions) -> int:
    """Each log under its name. The exit code is that of the worst."""
    from ddpdiag.explain.render import as_github, as_json, render  # rich, which the page of a code does not need

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


def _pieces(word: str, *, quiet: bool) -> Iterator[bytes]:
    """A log, or standard input ("-"), in pieces."""
    if word == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; give the log's name, or pipe the log in")
        if sys.stdin.isatty() and not quiet:
            complain("reading the log from the terminal; end it with Ctrl-D")
    try:
        with nullcontext(sys.stdin.buffer) if word == "-" else open(word, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        source = STANDARD_INPUT if word == "-" else readable(word)
        raise UsageError(f"cannot read {source}: {error.strerror or error}") from error
