"""Read and write JSON and recordings, without pickle or silent loss, and with limits on size, depth and numbers.

JSON has no NaN, and msgspec writes it as null, which would mean that a value is not known. So a non-finite float is
written as the string "nan", "inf" or "-inf" and read back as the float that it was.
"""

import errno
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from ddpdiag.errors import UsageError
from ddpdiag.model import End, Event, Header, Outcome, Recording, Skip, Trial
from ddpdiag.model.recording import SCHEMA, Line
from ddpdiag.model.trial import Arrival, refused_override

T = TypeVar("T")
K = TypeVar("K", int, tuple[int, int])

# ddpdiag writes no longer lines: its largest record (the stacks of a rank that hangs) has some 100 kB.
MAX_LINE_BYTES = 4 << 20
# The recording of 8,192 simulated ranks has 20 MB, and `ddpdiag simulate` takes up to a million.
MAX_RECORDING_BYTES = 4 << 30
# The limit of all other files, which are read into memory at once.
MAX_FILE_BYTES = 512 << 20
# Every measurement lies between these (a diverging loss, too), and squares and quotients of them are finite.
LARGEST_NUMBER, SMALLEST_NUMBER = 1e100, 1e-100
# The exponent of a number beyond these limits, or a part of a name: only then is each number checked.
_SUSPECT = re.compile(rb"[eE][+-]?[0-9]{3}")


def readable(text: str) -> str:
    """`text` with each lone surrogate (a byte of a variable or path that is not UTF-8) as an escape, for JSON."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _spell(value: Any) -> Any:  # noqa: ANN401 - any tree of plain data
    """`value` with every non-finite float as a string, and every string without lone surrogates."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return readable(value)
        case dict():
            return {_spell(key): _spell(item) for key, item in value.items()}
        case list() | tuple():
            return [_spell(item) for item in value]
        case _:
            return value


def encode(value: object) -> bytes:
    """`value` (a Struct or plain data) as one line of JSON, without a newline."""
    return msgspec.json.encode(_spell(msgspec.to_builtins(value)))


def pretty(value: object) -> str:
    """`value` as indented JSON with a newline at the end; a non-finite number is the string "nan", "inf" or "-inf"."""
    return msgspec.json.format(encode(value), indent=2).decode() + "\n"


def decode(data: bytes | msgspec.Raw, kind: type[T], *, least: float = 0.0) -> T:
    """Decode `data` as a `kind`. Raises msgspec.ValidationError or DecodeError if it is none, or beyond the limits.

    `least` is the smallest size of a number, except 0, that is accepted: quotients of smaller numbers underflow.
    """
    # strict=False is what reads "nan" back into a float.
    return _within_limits(lambda: msgspec.json.decode(data, type=kind, strict=False), data, least)


def _within_limits(read: Callable[[], T], data: bytes | msgspec.Raw, least: float) -> T:
    try:
        value = read()
        _check_numbers(data, value, least)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error
    return value


def _check_numbers(data: bytes | msgspec.Raw, value: object, least: float) -> None:
    """Raise msgspec.ValidationError if `value`, decoded from `data`, has a number that cannot be a measurement."""
    if _SUSPECT.search(data) is None:
        return
    # Numbers in `Raw` are checked later, when that is decoded.
    waiting: list[object] = [msgspec.to_builtins(value, enc_hook=lambda _raw: None)]
    while waiting:
        match waiting.pop():
            case dict() as item:
                waiting += item.values()
            case list() | tuple() as item:
                waiting += item
            case float() as number if math.isfinite(number) and number:
                if not least <= abs(number) <= LARGEST_NUMBER:
                    limits = f"0, or {least:g} to {LARGEST_NUMBER:g}"
                    raise msgspec.ValidationError(f"{number:.3g} is no measurement; expected {limits}")


def open_file(path: str | Path) -> BufferedReader:
    """Open a file for reading. Raises OSError for a named pipe or a device, which may let its reader wait for ever.

    Open descriptors of this process, such as /dev/stdin or <(command), and /dev/null are opened all the same.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    is_plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not is_plain and not os.path.realpath(path).startswith(("/proc/", "/dev/null")):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EISDIR) if os.path.isdir(path) else "it is no plain file")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file. Raises OSError, with the limit as its reason, if the file has more than `most` bytes."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise OSError(errno.EFBIG, f"it has more than {size}, the most that is read")
    return data


def encode_line(line: Line) -> bytes:
    """Encode one record of a recording as a line. `Raw` values in the record must come from `encode`."""
    return msgspec.json.encode(line) + b"\n"


_line_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def read_recording(paths: Iterable[Path]) -> Recording:
    """Read the recording of one run: from one file, from the files that its ranks wrote, or from a folder of these.

    A line that is cut off or unreadable ends the reading of its file, and a note in the result says so.
    Raises UsageError for a file that cannot be read, is no recording, or belongs to another run.
    """
    lines: list[Line] = []
    notes: list[str] = []
    for path in paths:
        lines += _read_folder(path, notes) if path.is_dir() else _read_file(path, notes)
    return assemble(lines, notes)


def _read_folder(folder: Path, notes: list[str]) -> list[Line]:
    """Read all recordings in a folder, run.jsonl first: in it rank 0 decided places and times. Adds to `notes`."""
    lines: list[Line] = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (path.name != "run.jsonl", path.name)):
        try:
            lines += _read_file(path, notes)
        except UsageError as error:  # a rank that was killed may have written nothing yet
            notes.append(str(error))
    if not lines:
        raise UsageError(f"{readable(str(folder))} holds no recording of ddpdiag (run.jsonl, rank-0.jsonl, ...)")
    return lines


def _read_file(path: Path, notes: list[str]) -> list[Line]:
    where = readable(str(path))
    lines: list[Line] = []
    for number, row in enumerate(_rows(path), 1):
        if row == b"\n":
            continue
        try:
            if len(row) > MAX_LINE_BYTES:
                raise msgspec.DecodeError(f"line of more than {MAX_LINE_BYTES} bytes")
            lines.append(_within_limits(partial(_line_decoder.decode, row), row, SMALLEST_NUMBER))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not lines:
                raise UsageError(f"{where}: not a ddpdiag recording: line {number}: {error}") from error
            cut = len(row) <= MAX_LINE_BYTES and not row.endswith(b"\n")
            notes.append(
                f"{path.name} is cut off in line {number}; what comes before it was judged"
                if cut
                else f"{path.name} is unreadable from line {number} on ({error}); what comes before it was judged"
            )
            break
        if isinstance(line := lines[-1], Trial) and (refused := refused_override(line.env)) is not None:
            raise UsageError(f"{where}: its trial {line.number} sets {refused}, which no check sets")
    if not lines or not isinstance(lines[0], Header):
        raise UsageError(f"{where}: not a ddpdiag recording: its first line is not a header")
    if lines[0].schema != SCHEMA:
        raise UsageError(f"{where} has schema {lines[0].schema!r}; this ddpdiag reads {SCHEMA!r}")
    return lines


def _rows(path: Path) -> Iterator[bytes]:
    """Read the lines of a file. A line that is too long is cut. Raises UsageError if the file cannot be read."""
    left = MAX_RECORDING_BYTES
    try:
        with open_file(path) as file:
            while row := file.readline(MAX_LINE_BYTES + 1):
                left -= len(row)
                if left < 0:
                    raise OSError(
                        errno.EFBIG, f"it has more than {MAX_RECORDING_BYTES >> 30} GiB, the most that is read"
                    )
                yield row
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read recording {readable(str(path))}: {reason}") from error


def assemble(lines: Iterable[Line], notes: Iterable[str] = ()) -> Recording:
    """Build a recording from its lines. A record that is in two files counts once.

    The header is rank 0's if it is there: only that one says how ranks are authenticated. Raises UsageError if the
    lines belong to different runs, or if there is no header.
    """
    by_kind: dict[type, list[Any]] = defaultdict(list)
    for line in lines:
        by_kind[type(line)].append(line)
    headers: list[Header] = by_kind[Header]
    if not headers:
        raise UsageError("no recording given")
    if len(runs := {header.run_id for header in headers}) > 1:
        raise UsageError(f"the files belong to different runs: {', '.join(sorted(runs))}; give the files of one run")
    arrivals = _sorted_by_key({a.place.rank: a for a in reversed(by_kind[Arrival])})
    trials = _merged(by_kind[Trial])
    outcomes = _sorted_by_key({(o.trial, o.rank): o for o in reversed(by_kind[Outcome])})
    skips = {skip.code: skip for skip in by_kind[Skip]}
    return Recording(
        header=next((header for header in headers if header.authentication), headers[0]),
        arrivals=arrivals,
        trials=tuple(trials.values()),
        outcomes=tuple(outcomes.values()),
        events=tuple({encode_line(event): event for event in by_kind[Event]}.values()),
        skips=tuple(skips.values()),
        end=by_kind[End][-1] if by_kind[End] else None,
        problems=tuple(notes),
    )


def extend(recording: Recording, lines: Sequence[Line]) -> Recording:
    """Add `lines` to a recording. The result is that of `assemble` for all lines; it is fast if `lines` come later.

    The coordinator of thousands of ranks does this some hundred times in a run.
    """
    new = assemble([recording.header, *lines])
    later = _later([t.number for t in recording.trials], [t.number for t in new.trials]) and _later(
        [(o.trial, o.rank) for o in recording.outcomes[-1:]], [(o.trial, o.rank) for o in new.outcomes[:1]]
    )
    if not later or not recording.arrivals.keys().isdisjoint(new.arrivals):
        return assemble([*disassemble(recording), *lines], recording.problems)
    return Recording(
        header=new.header,
        arrivals=_sorted_by_key({**recording.arrivals, **new.arrivals}) if new.arrivals else recording.arrivals,
        trials=recording.trials + new.trials,
        outcomes=recording.outcomes + new.outcomes,
        events=tuple({encode_line(event): event for event in recording.events + new.events}.values()),
        skips=tuple({skip.code: skip for skip in recording.skips + new.skips}.values()),
        end=new.end or recording.end,
        problems=recording.problems,
    )


def _later(old: Sequence[K], new: Sequence[K]) -> bool:
    """Whether all keys of `new` come after those of `old`. Both are sorted."""
    return not old or not new or old[-1] < new[0]


def _merged(trials: Iterable[Trial]) -> dict[int, Trial]:
    """Merge the records of each trial, and return the trials by number. A rank's record has only that rank's group."""
    first: dict[int, Trial] = {}
    groups: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for trial in trials:
        first.setdefault(trial.number, trial)
        groups[trial.number].update(trial.groups)
    # If the first record of a trial has all of its groups, their order is kept.
    more = {number: trial for number, trial in first.items() if len(groups[number]) != len(trial.groups)}
    first |= {number: structs.replace(trial, groups=tuple(sorted(groups[number]))) for number, trial in more.items()}
    return dict(sorted(first.items()))


def _sorted_by_key(lines: dict[K, T]) -> dict[K, T]:
    """Sort lines by their keys. Callers insert lines in reverse, so that of two with one key the first counts."""
    return dict(sorted(lines.items()))


def disassemble(recording: Recording) -> Iterator[Line]:
    """The lines of a recording, without its notes: `assemble` makes the same recording of them."""
    yield recording.header
    yield from recording.arrivals.values()
    yield from recording.trials
    yield from recording.outcomes
    yield from recording.events
    yield from recording.skips
    if recording.end is not None:
        yield recording.end
