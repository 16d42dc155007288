"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from ddpdiag.cli.edge import standard_input
from ddpdiag.cli.manual import code_of, manual_page
from ddpdiag.cli.options import Color, DisplayOptions
from ddpdiag.cli.outputs import show, terminal
from ddpdiag.codec import open_file, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.explain.tally import STANDARD_INPUT

_DEFAULT = DisplayOptions()
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9]{2}\d{3}(\..*)?")
# Suffixes of logs.
_SUFFIXES = (".out", ".log", ".err", ".txt")
_PIECE_BYTES = 1 << 18


def run(words: Sequence[str], how: DisplayOptions = _DEFAULT) -> int:
    """Print what explains `words`; 3 where a text, or all logs, have no known failure."""
    text = " ".join(words)
    if len(words) == 1 and (code := text if _CODE.fullmatch(text) else code_of(text)) is not None:
        _show_page(code, how.color)
        return ExitCode.FIT
    if all(map(_is_log, words)):
        names = {log: STANDARD_INPUT if log == "-" else readable(log) for log in words}
        return _show([explain_log(_pieces(log, quiet=how.quiet), names[log]) for log in words], how)
    missing = next((word for word in words if _is_missing_log(word)), None)
    if missing is not None and any(map(_is_log, words)):
        raise UsageError(f"{readable(missing)}: no such file")
    # Pasted text is a log without a name: the numbers of its lines are of no use.
    explained = explain_log([text.encode("utf-8", "surrogateescape")], "")
    if not explained.sightings and not re.search(r"\s", text.strip()):
        if missing is not None:
            raise UsageError(f"{readable(missing)}: no such file")
        raise UsageError(
            f"{readable(text)!r} is not a code, not the name of a check and not a known error text; "
            "`ddpdiag checks` lists codes and names"
        )
    exit_code = _show([explained], how)
    if explained.is_explained:
        _show_page(explained.sightings[0].card.code, how.color, "\n")
    return exit_code


def _is_log(word: str) -> bool:
    return word == "-" or os.path.isfile(word)


def _is_missing_log(word: str) -> bool:
    return not _is_log(word) and ("/" in word or word.endswith(_SUFFIXES))


def _show(found: Sequence[Explanation], how: DisplayOptions) -> int:
    """Print each log under its name; the exit code is that of the best."""
    from ddpdiag.explain.render import render  # rich, which a page needs not

    width, color = terminal(sys.stdout, how.color)
    show(render(found, width=width, color=color), sys.stdout)
    return ExitCode.FIT if any(log.is_explained for log in found) else ExitCode.UNKNOWN


def _show_page(code: str, when: Color, before: str = "") -> None:
    width, color = terminal(sys.stdout, when)
    show(before + manual_page(code, width=width, color=color), sys.stdout)


def _pieces(word: str, *, quiet: bool) -> Iterator[bytes]:
    """A log, or standard input ("-"), in pieces."""
    try:
        with nullcontext(standard_input("log", quiet=quiet)) if word == "-" else open_file(word) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        source = STANDARD_INPUT if word == "-" else readable(word)
        raise UsageError(f"cannot read {source}: {error.strerror or error}") from error
