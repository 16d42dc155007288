"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice

from ddpdiag.cli.edge import complain, standard_input
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
_HEAD_BYTES = 1024
_MOST_FILES = 4096  # torchrun's two files for each of 2,048 ranks


def run(words: Sequence[str], how: DisplayOptions = _DEFAULT) -> int:
    """Print what explains `words`. Returns the exit code: 3 if the text, or every log, has no known failure."""
    text = " ".join(words)
    if len(words) == 1 and (code := text if _CODE.fullmatch(text) else code_of(text)) is not None:
        _show_page(code, how.color)
        return ExitCode.FIT
    if all(map(_is_log, words)):
        logs = [log for word in words for log in (_logs(word) if os.path.isdir(word) else [word])]
        names = {log: STANDARD_INPUT if log == "-" else readable(log) for log in logs}
        return _show([explain_log(_pieces(log, quiet=how.quiet), names[log]) for log in logs], how)
    missing = next((word for word in words if _is_missing_log(word)), None)
    if missing is not None and any(map(_is_log, words)):
        raise UsageError(f"{readable(missing)}: no such file")
    # Pasted text is a log without a name, whose line numbers are not shown.
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
    return word == "-" or os.path.isfile(word) or os.path.isdir(word)


def _is_missing_log(word: str) -> bool:
    return not _is_log(word) and ("/" in word or word.endswith(_SUFFIXES))


def _logs(folder: str) -> list[str]:
    """The text files below a folder, among its first `_MOST_FILES` files; UsageError if there is none."""
    files = list(islice(_files(folder), _MOST_FILES + 1))
    if len(files) > _MOST_FILES:
        complain(f"{readable(folder)} has more than {_MOST_FILES:,} files; the others are not read")
    logs = [path for path in files[:_MOST_FILES] if _is_text(path)]
    if not logs:
        raise UsageError(f"{readable(folder)}: no text file in this folder")
    return logs


def _files(folder: str) -> Iterator[str]:
    """The plain files below a folder, in the order of their names. Links and hidden files are left out."""
    for path, inner, names in os.walk(folder, onerror=lambda error: _leave_out(error.filename, error)):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        files = (os.path.join(path, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if os.path.isfile(file) and not os.path.islink(file))


def _is_text(path: str) -> bool:
    """Whether a file has content, and no zero byte at its beginning. Complains if the file cannot be read."""
    try:
        with open_file(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        _leave_out(path, error)
        return False
    return bool(head) and b"\0" not in head


def _leave_out(path: str, error: OSError) -> None:
    complain(f"cannot read {readable(path)}: {error.strerror or error}; it is left out")


def _show(found: Sequence[Explanation], how: DisplayOptions) -> int:
    """Print what explains each log. Returns the exit code: 0 if any log is explained, else 3."""
    from ddpdiag.explain.render import render  # imports rich, which a manual page does not need

    width, color = terminal(sys.stdout, how.color)
    show(render(found, width=width, color=color), sys.stdout)
    return ExitCode.FIT if any(log.is_explained for log in found) else ExitCode.UNKNOWN


def _show_page(code: str, when: Color, before: str = "") -> None:
    width, color = terminal(sys.stdout, when)
    show(before + manual_page(code, width=width, color=color), sys.stdout)


def _pieces(word: str, *, quiet: bool) -> Iterator[bytes]:
    """Read a log, or standard input ("-"), in pieces. Raises UsageError if that fails."""
    try:
        with nullcontext(standard_input("log", quiet=quiet)) if word == "-" else open_file(word) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        source = STANDARD_INPUT if word == "-" else readable(word)
        raise UsageError(f"cannot read {source}: {error.strerror or error}") from error
