"""`ddpdiag explain`: explain the code of a finding, the name of a check, an error text, or logs."""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

from ddpdiag.cli.edge import complain, standard_input
from ddpdiag.cli.manual import code_of, manual_page
from ddpdiag.cli.options import Color, DisplayArgs, ExplainArgs
from ddpdiag.cli.outputs import show, terminal_style
from ddpdiag.codec import open_file, readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.evidence.attribution import Job, find_faults
from ddpdiag.evidence.dumps import may_be_dump, read_dumps
from ddpdiag.explain.log_files import Log, in_order, origins_of_paths
from ddpdiag.explain.matcher import Explanation, explain_job, explain_log
from ddpdiag.explain.tally import STANDARD_INPUT

if TYPE_CHECKING:
    from ddpdiag.render.blocks import Block

_DEFAULT_ARGS = ExplainArgs()
_CODE_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9]{2}\d{3}(\..*)?")
_LOG_SUFFIXES = (".out", ".log", ".err", ".txt")
_RUN_HEAD = re.compile(rb'\{\s*(?:"schema": ?"ddpdiag\.|"type": ?"header", ?"run_id")')
_PIECE_BYTES = 1 << 18
_HEAD_BYTES = 1024
_MAX_FILES = 4096  # torchrun's two files for each of 2,048 ranks


def run(words: Sequence[str], args: ExplainArgs = _DEFAULT_ARGS) -> int:
    """Explain the command's arguments, and print the result. Returns 0 if anything was explained, else 3."""
    text = " ".join(words)
    if len(words) == 1 and (code := text if _CODE_PATTERN.fullmatch(text) else code_of(text)) is not None:
        _print_page(code, args.color)
        return ExitCode.FIT
    if all(map(_is_input, words)):
        files = [file for word in words for file in (files_below(word) if os.path.isdir(word) else [word])]
        logs, dumps, runs = _classify(files)
        exit_code = _explain_dumps(dumps, args) if dumps else ExitCode.UNKNOWN
        exit_code = min(exit_code, _explain_runs(runs, args)) if runs else exit_code
        if not logs:
            return exit_code
        explained_job = explain_files(logs, quiet=args.quiet)
        if (dumps or runs) and not explained_job.sightings:
            return exit_code
        return min(exit_code, _print_explanation(explained_job, args))
    names_of_files = (word for word in words if "/" in word or word.endswith(_LOG_SUFFIXES))
    missing = next((name for name in names_of_files if not _is_input(name)), None)
    if missing is not None and any(map(_is_input, words)):
        raise UsageError(f"{readable(missing)}: no such file")
    # Pasted text is a log without a name, whose line numbers are not shown.
    explained = explain_log([text.encode("utf-8", "surrogateescape")], "")
    if not explained.sightings:
        if missing is not None and len(words) == 1:
            raise UsageError(f"{readable(missing)}: no such file")
        return _look_up(text, args)
    exit_code = _print_explanation(explained, args)
    if explained.is_explained:
        _print_page(explained.sightings[0].card.code, args.color, "\n")
    return exit_code


def explain_files(logs: Sequence[str], *, quiet: bool = True) -> Explanation:
    """Explain the logs of a job, of which "-" is standard input. Raises UsageError if a log cannot be read."""
    names = {log: STANDARD_INPUT if log == "-" else readable(log) for log in in_order(logs)}
    origins = origins_of_paths(list(names))
    return explain_job(Log(name, _read_pieces(log, quiet=quiet), origins[log]) for log, name in names.items())


def _look_up(query: str, args: ExplainArgs) -> int:
    """Print the card that has all words of the query, or else the nearest cards. Returns 0 or 3."""
    from ddpdiag.explain.query import find_cards
    from ddpdiag.explain.render import card_blocks

    cards, is_found = find_cards(query)
    _show(card_blocks(query, cards, is_found=is_found), args)
    return ExitCode.FIT if is_found else ExitCode.UNKNOWN


def _is_input(word: str) -> bool:
    return word == "-" or os.path.isfile(word) or os.path.isdir(word)


def files_below(folder: str) -> list[str]:
    """The text files and dumps among the first `_MAX_FILES` files below a folder. Raises UsageError if it has none."""
    files = list(islice(_plain_files(folder), _MAX_FILES + 1))
    if len(files) > _MAX_FILES:
        complain(f"{readable(folder)} has more than {_MAX_FILES:,} files; the others are not read")
    known = [
        path
        for path in files[:_MAX_FILES]
        if (head := _head(path, complain_unreadable=True)) and (b"\0" not in head or may_be_dump(path, head))
    ]
    if not known:
        raise UsageError(f"{readable(folder)}: no text file and no flight-recorder dump in this folder")
    return known


def _classify(files: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Separate logs from dumps of torch's flight recorder and from reports and recordings of ddpdiag."""
    heads = {path: b"" if path == "-" else _head(path) for path in files}
    dumps = {path: None for path, head in heads.items() if path != "-" and may_be_dump(path, head)}
    runs = {path: None for path, head in heads.items() if path not in dumps and _RUN_HEAD.match(head)}
    return [path for path in heads if path not in dumps and path not in runs], [*dumps], [*runs]


def _plain_files(folder: str) -> Iterator[str]:
    """Yield the plain files below a folder, sorted by name in each folder, without links and hidden files."""
    for path, folders, names in os.walk(folder, onerror=lambda error: _complain_unreadable(error.filename, error)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (os.path.join(path, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if os.path.isfile(file) and not os.path.islink(file))


def _head(path: str, *, complain_unreadable: bool = False) -> bytes:
    """The first `_HEAD_BYTES` bytes of a file, or b"" if the file cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        if complain_unreadable:
            _complain_unreadable(path, error)
        return b""


def _complain_unreadable(path: str, error: OSError) -> None:
    complain(f"cannot read {readable(path)}: {error.strerror or error}; it is left out")


def _explain_dumps(paths: Sequence[str], display: DisplayArgs) -> int:
    """Print the faults that dumps show. Returns the exit code: 0 if any fault is known, else 3."""
    from ddpdiag.explain.render import render_job  # imports rich, which a manual page does not need

    witnesses, problems = read_dumps(paths)
    job = Job(witnesses)
    for problem in problems:
        complain(problem)
    faults = find_faults(job)
    width, color = terminal_style(sys.stdout, display.color)
    show(render_job(job, faults, width=width, color=color), sys.stdout)
    return ExitCode.FIT if faults else ExitCode.UNKNOWN


def _explain_runs(paths: Sequence[str], args: ExplainArgs) -> int:
    """Print the verdict and the first finding of ddpdiag's own reports and recordings. Returns 0 if any can be read."""
    from ddpdiag.explain.render import run_blocks
    from ddpdiag.judgement.reading import read_report

    exit_code = ExitCode.UNKNOWN
    recordings = Counter(os.path.dirname(path) for path in paths if path.endswith(".jsonl"))
    # Several recordings in a folder are what the ranks of one run wrote.
    runs = [folder or "." if recordings[folder := os.path.dirname(path)] > 1 else path for path in paths]
    for run_path in dict.fromkeys(runs):
        try:
            report = read_report(run_path)
        except UsageError as error:
            complain(str(error))
            continue
        _show(run_blocks(readable(run_path), report), args)
        show("\n", sys.stdout)
        exit_code = ExitCode.FIT
    return exit_code


def _print_explanation(explanation: Explanation, args: ExplainArgs) -> int:
    """Print the explanation. Returns the exit code: 0 if the text or the logs are explained, else 3."""
    from ddpdiag.explain.render import log_blocks

    _show(log_blocks(explanation), args)
    return ExitCode.FIT if explanation.is_explained else ExitCode.UNKNOWN


def _show(blocks: "Iterable[Block]", args: ExplainArgs) -> None:
    from ddpdiag.explain.render import render  # imports rich, which a manual page does not need

    width, color = terminal_style(sys.stdout, args.color)
    show(render(blocks, width=width, color=color, details=args.details), sys.stdout)


def _print_page(code: str, color_option: Color, prefix: str = "") -> None:
    width, color = terminal_style(sys.stdout, color_option)
    show(prefix + manual_page(code, width=width, color=color), sys.stdout)


def _read_pieces(word: str, *, quiet: bool) -> Iterator[bytes]:
    """Read a log, or standard input for "-", in pieces. Raises UsageError if it cannot be read."""
    try:
        with nullcontext(standard_input("log", quiet=quiet)) if word == "-" else open_file(word) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        source = STANDARD_INPUT if word == "-" else readable(word)
        raise UsageError(f"cannot read {source}: {error.strerror or error}") from error
