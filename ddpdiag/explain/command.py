"""`ddpdiag explain`: a code, a name, an error text, or a log."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress

from ddpdiag.cli.edge import complain, standard_input
from ddpdiag.cli.manual import code_of, manual_page
from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import ExplainOptions, is_one_file, show, terminal
from ddpdiag.codec import open_file, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.explain.tally import STANDARD_INPUT
from ddpdiag.render import files

_CODE = re.compile(r"[A-Za-z][A-Za-z0-9]{2}\d{3}(\..*)?")
# Suffixes of logs.
_SUFFIXES = (".out", ".log", ".err", ".txt")
_PIECE_BYTES = 1 << 18
# torchrun's log directory has the ranks' files three folders down: DIR/RUN/attempt_0/RANK/stderr.log.
_DEEPEST = 3
_MOST_FILES = 1000
_HEAD_BYTES = 1024
_AS_TEXT = ExplainOptions()


def run(words: Sequence[str], how: ExplainOptions = _AS_TEXT) -> int:
    """Print what explains `words`; 3 where a text, a log or all logs of a folder have no known failure."""
    text = " ".join(words)
    if len(words) == 1 and (code := text if _CODE.fullmatch(text) else code_of(text)) is not None:
        if how.json is not None:
            raise UsageError(f"--json: {readable(text)} is a manual page; give an error text or a log")
        _show_page(code, how.color)
        return ExitCode.FIT
    logs = [log for word in words for log in _logs(word)] if all(map(_is_log, words)) else []
    if how.json is not None:
        _check_output(how.json, logs)
    if logs:
        names = {log: STANDARD_INPUT if log == "-" else readable(log) for log in logs}
        found = [explain_log(_pieces(log, quiet=how.quiet), names[log]) for log in logs]
        return _show(found, how, has_folder=any(map(os.path.isdir, words)))
    if any(map(_is_log, words)) and (missing := [word for word in words if _is_missing_log(word)]):
        raise UsageError(f"{readable(missing[0])}: no such file")
    # Pasted text is a log without a name: the numbers of its lines are of no use.
    explained = explain_log([text.encode("utf-8", "surrogateescape")], "")
    if not explained.sightings and not re.search(r"\s", text.strip()):
        if _is_missing_log(text):
            raise UsageError(f"{readable(text)}: no such file")
        raise UsageError(
            f"{readable(text)!r} is not a code, not the name of a check and not a known error text; "
            "`ddpdiag checks` lists codes and names"
        )
    exit_code = _show([explained], how)
    if explained.is_explained and how == ExplainOptions(quiet=how.quiet, color=how.color):
        _show_page(explained.sightings[0].card.code, how.color, "\n")
    return exit_code


def _is_log(word: str) -> bool:
    return word == "-" or os.path.isfile(word) or os.path.isdir(word)


def _logs(word: str) -> Iterator[str]:
    """The log itself, or the text files of a folder and of the folders in it, sorted, `_MOST_FILES` at most."""
    if not os.path.isdir(word):
        yield word
        return
    number = 0
    for folder, inner, names in os.walk(word):
        is_deepest = os.path.relpath(folder, word).count(os.sep) + (folder != word) >= _DEEPEST
        inner[:] = [] if is_deepest else sorted(name for name in inner if not name.startswith("."))
        for path in (os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")):
            if not _is_text(path):
                continue
            if number == _MOST_FILES:
                complain(f"{readable(word)} has more than {_MOST_FILES:,} text files; the others are not read")
                return
            number += 1
            yield path
    if not number:
        raise UsageError(f"{readable(word)}: no text file in this folder")


def _is_text(path: str) -> bool:
    """Whether it is a file with content, of which the beginning has no zero byte."""
    with suppress(OSError), open_file(path) as file:
        head = file.read(_HEAD_BYTES)
        return bool(head) and b"\0" not in head
    return False


def _is_missing_log(word: str) -> bool:
    return not _is_log(word) and ("/" in word or word.endswith(_SUFFIXES))


def _check_output(path: str, logs: Sequence[str]) -> None:
    """UsageError if the file cannot be written, or is a log that is read."""
    files.check_writable(path)
    if path == files.STANDARD_OUTPUT:
        return
    if any(is_one_file(path, log) for log in logs):
        raise UsageError(f"--json {path} would overwrite the log that is read; give it another file")


def _show(found: Sequence[Explanation], how: ExplainOptions, *, has_folder: bool = False) -> int:
    """Print each log under its name; the exit code is that of the worst, of a folder that of the best."""
    from ddpdiag.explain.render import as_json, render  # rich, which a page needs not

    is_explained = (any if has_folder else all)(each.is_explained for each in found)
    exit_code = ExitCode.FIT if is_explained else ExitCode.UNKNOWN
    stream = sys.stderr if how.json == files.STANDARD_OUTPUT else sys.stdout
    width, color = terminal(stream, how.color)
    if how.json is not None:
        files.write(how.json, as_json(found, exit_code))
    show(render(found, width=width, color=color, has_folder=has_folder), stream)
    return exit_code


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
