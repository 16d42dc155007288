"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from ddpdiag.cli.edge import complain
from ddpdiag.cli.manual import code_of, manual_page
from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import show, terminal
from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.explain.matcher import Explanation, explain_log

_CODE = re.compile(r"[A-Za-z][A-Za-z0-9]{2}\d{3}(\..*)?")
# What logs are called.
_SUFFIXES = (".out", ".log", ".err", ".txt")
_PIECE_BYTES = 1 << 18


def run(words: Sequence[str], *, quiet: bool = False, color: Color = Color.AUTO) -> int:
    """Print what explains `words`; 3 where no known failure is in a text or log."""
    text = " ".join(words)
    if text == "-":
        return _show(explain_log(_standard_input(quiet=quiet), "standard input"), color)
    if len(words) == 1 and (code := text if _CODE.fullmatch(text) else code_of(text)) is not None:
        _show_page(code, color)
        return ExitCode.FIT
    if all(os.path.isfile(word) for word in words):
        if len(words) > 1:
            raise UsageError(f"{len(words)} files given, one expected; for several: `cat ... | ddpdiag explain -`")
        return _show(explain_log(_file(text), readable(text)), color)
    return _text(text, color)


def _text(text: str, when: Color) -> int:
    # Pasted text is a log without a name: the numbers of its lines are of no use.
    found = explain_log([text.encode("utf-8", "surrogateescape")], "")
    if not found.sightings and not re.search(r"\s", text.strip()):
        if "/" in text or text.endswith(_SUFFIXES):
            raise UsageError(f"{readable(text)}: no such file")
        raise UsageError(
            f"{readable(text)!r} is not a code, not the name of a check and not a known error text; "
            "`ddpdiag checks` lists codes and names"
        )
    exit_code = _show(found, when)
    if found.is_explained:
        _show_page(found.sightings[0].card.code, when, "\n")
    return exit_code


def _show(found: Explanation, when: Color) -> int:
    from ddpdiag.explain.render import render  # rich, which the page of a code does not need

    width, color = terminal(sys.stdout, when)
    show(render(found, width=width, color=color), sys.stdout)
    return ExitCode.FIT if found.is_explained else ExitCode.UNKNOWN


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
