"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpdiag.cli.edge import complain
from ddpdiag.cli.manual import code_of, manual_page
from ddpdiag.cli.outputs import show, terminal
from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode, UsageError

_CODE = re.compile(r"[A-Za-z][A-Za-z0-9]{2}\d{3}(\..*)?")
# What logs are called.
_SUFFIXES = (".out", ".log", ".err", ".txt")
_PIECE_BYTES = 1 << 18


def run(words: Sequence[str]) -> int:
    """Print what explains `words`; 3 where nothing is known of a text or log."""
    text = " ".join(words)
    width, color = terminal(sys.stdout)
    if text == "-":
        return _log(_standard_input(), "standard input", width, color=color)
    if len(words) == 1 and (code := text if _CODE.fullmatch(text) else code_of(text)) is not None:
        show(manual_page(code, width=width, color=color), sys.stdout)
        return ExitCode.FIT
    if all(os.path.isfile(word) for word in words):
        if len(words) > 1:
            raise UsageError(f"{len(words)} files; give one log, or all of them by `cat ... | ddpdiag explain -`")
        return _log(_file(text), readable(text), width, color=color)
    return _text(text, width, color=color)


def _text(text: str, width: int, *, color: bool) -> int:
    from ddpdiag.explain.matcher import explain_log
    from ddpdiag.explain.render import is_explained, render

    # Pasted text is a log without a name: its lines are counted, and nobody asks where they stand.
    found = explain_log([text.encode("utf-8", "surrogateescape")], "")
    if not found.sightings and not re.search(r"\s", text.strip()):
        if "/" in text or text.endswith(_SUFFIXES):
            raise UsageError(f"there is no file {readable(text)}")
        raise UsageError(
            f"{readable(text)!r} is no code, no check's name and no error text that I know; "
            "`ddpdiag checks` lists codes and names"
        )
    show(render(found, width=width, color=color), sys.stdout)
    if is_explained(found):
        _page(found.sightings[0].symptom.code, width, color=color)
        return ExitCode.FIT
    return ExitCode.UNKNOWN


def _log(pieces: Iterator[bytes], source: str, width: int, *, color: bool) -> int:
    from ddpdiag.explain.matcher import explain_log
    from ddpdiag.explain.render import is_explained, render

    found = explain_log(pieces, source)
    show(render(found, width=width, color=color), sys.stdout)
    return ExitCode.FIT if is_explained(found) else ExitCode.UNKNOWN


def _page(code: str, width: int, *, color: bool) -> None:
    """The page of the check that explains the first cause."""
    show("\n" + manual_page(code, width=width, color=color), sys.stdout)


def _standard_input() -> Iterator[bytes]:
    if sys.stdin is None:
        raise UsageError("standard input is closed; give the log's name, or pipe it in")
    if sys.stdin.isatty():
        complain("reading the log from the terminal; end it with Ctrl-D")
    try:
        while piece := sys.stdin.buffer.read(_PIECE_BYTES):
            yield piece
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror or error}") from error


def _file(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise UsageError(f"cannot read {readable(path)}: {error.strerror or error}") from error
