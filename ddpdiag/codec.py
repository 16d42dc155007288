"""Read and write JSON and recordings, without pickle, with limits on size, depth and numbers.

JSON has no NaN, and msgspec writes NaN as null, which would mean that a value is not known. So a non-finite float is
written as the string "nan", "inf" or "-inf", and reading converts that string to the float again.
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

# Far above the longest line that ddpdiag writes: the record with the stacks of a rank that hangs has some 100 kB.
MAX_LINE_BYTES = 4 << 20
# The recording of 8,192 simulated ranks has 20 MB, and `ddpdiag simulate` takes up to a million.
MAX_RECORDING_BYTES = 4 << 30
# The limit of all other kinds of files, which are read into memory at once.
MAX_FILE_BYTES = 512 << 20
# Every measurement, even a diverging loss, lies between these limits. Squares and quotients within them are finite.
LARGEST_NUMBER, SMALLEST_NUMBER = 1e100, 1e-100
# A number beyond these limits has an exponent of three digits. Data are searched number by number only if this matches.
_HUGE_EXPONENT = re.compile(rb"[eE][+-]?[0-9]{3}")


def readable(text: str) -> str:
    """`text` with each lone surrogate as an escape, for JSON. Such surrogates stand for bytes that are not UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _json_safe(value: Any) -> Any:  # noqa: ANN401 - any tree of plain data
    """`value` with every non-finite float as a string, and every string as `readable` returns it."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return readable(value)
        case dict():
            return {_json_safe(key): _json_safe(item) for key, item in value.items()}
        case list() | tuple():
            return [_json_safe(item) for item in value]
        case _:
            return value


def encode(value: object) -> bytes:
    """Encode a Struct or plain data as one line of JSON, without a newline."""
    return msgspec.json.encode(_json_safe(msgspec.to_builtins(value)))


def indented_json(value: object) -> str:
    """Encode `value` as `encode` does, but as indented JSON with a newline at the end."""
    return msgspec.json.format(encode(value), indent=2).decode() + "\n"


def decode(data: bytes | msgspec.Raw, kind: type[T], *, min_magnitude: float = 0.0) -> T:
    """Decode `data` as the type `kind`. Raises msgspec.ValidationError or DecodeError if `data` has another form.

    Numbers above LARGEST_NUMBER, or other than 0 and below `min_magnitude`, are refused: a quotient could overflow.
    """
    # With strict=False, msgspec converts the string "nan" to a float.
    return _decode_within_limits(lambda: msgspec.json.decode(data, type=kind, strict=False), data, min_magnitude)


def _decode_within_limits(decode_data: Callable[[], T], data: bytes | msgspec.Raw, min_magnitude: float) -> T:
    try:
        value = decode_data()
        _check_numbers(data, value, min_magnitude)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error
    return value


def _check_numbers(data: bytes | msgspec.Raw, value: object, min_magnitude: float) -> None:
    """Raise msgspec.ValidationError if `value`, decoded from `data`, has a number outside of the limits."""
    if _HUGE_EXPONENT.search(data) is None:
        return
    # Numbers in a msgspec.Raw are checked when the Raw is decoded.
    unchecked: list[object] = [msgspec.to_builtins(value, enc_hook=lambda _raw: None)]
    while unchecked:
        match unchecked.pop():
            case dict() as item:
                unchecked += item.values()
            case list() | tuple() as item:
                unchecked += item
            case float() as number if math.isfinite(number) and number:
                if not min_magnitude <= abs(number) <= LARGEST_NUMBER:
                    limits = f"0, or {min_magnitude:g} to {LARGEST_NUMBER:g}"
                    raise msgspec.ValidationError(f"{number:.3g} is no measurement; expected {limits}")


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for a pipe or a device, which may block its reader for ever.

    Exceptions are descriptors of this process, such as /dev/stdin or <(command), and /dev/null: they are opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    is_plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not is_plain and not os.path.realpath(path).startswith(("/proc/", "/dev/null")):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EISDIR) if os.path.isdir(path) else "it is no plain file")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file. Raises OSError, with the limit as its reason, if the file has more than `max_bytes`."""
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
        raise OSError(errno.EFBIG, f"it has more than {size}, the most that is read")
    return data


def encode_line(line: Line) -> bytes:
    """Encode one record of a recording as a line with its newline. A msgspec.Raw in it must be a result of `encode`."""
    return msgspec.json.encode(line) + b"\n"


_line_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def read_recording(paths: Iterable[Path]) -> Recording:
    """Read the recording of one run from `paths`: files that its ranks wrote, or folders with such files.

    A line that is cut off or unreadable ends the reading of its file, and `Recording.problems` says so.
    Raises UsageError for a file that cannot be read, is not a recording, or belongs to another run.
    """
    lines: list[Line] = []
    problems: list[str] = []
    for path in paths:
        lines += _read_folder(path, problems) if path.is_dir() else _read_file(path, problems)
    return assemble(lines, problems)


def _read_folder(folder: Path, problems: list[str]) -> list[Line]:
    """Read all recordings in a folder, rank 0's (run.jsonl) first, and append to `problems` what could not be read."""
    lines: list[Line] = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (path.name != "run.jsonl", path.name)):
        try:
            lines += _read_file(path, problems)
        except UsageError as error:  # a rank that was killed may have written nothing yet
            problems.append(str(error))
    if not lines:
        raise UsageError(f"{readable(str(folder))} holds no recording of ddpdiag (run.jsonl, rank-0.jsonl, ...)")
    return lines


def _read_file(path: Path, problems: list[str]) -> list[Line]:
    path_text = readable(str(path))
    lines: list[Line] = []
    for number, row in enumerate(_rows(path), 1):
        if row == b"\n":
            continue
        try:
            if len(row) > MAX_LINE_BYTES:
                raise msgspec.DecodeError(f"line of more than {MAX_LINE_BYTES} bytes")
            lines.append(_decode_within_limits(partial(_line_decoder.decode, row), row, SMALLEST_NUMBER))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not lines:
                raise UsageError(f"{path_text}: not a ddpdiag recording: line {number}: {error}") from error
            is_cut_off = len(row) <= MAX_LINE_BYTES and not row.endswith(b"\n")
            problems.append(
                f"{path.name} is cut off in line {number}; what comes before it was judged"
                if is_cut_off
                else f"{path.name} is unreadable from line {number} on ({error}); what comes before it was judged"
            )
            break
        if isinstance(line := lines[-1], Trial) and (refused_variable := refused_override(line.env)) is not None:
            raise UsageError(f"{path_text}: its trial {line.number} sets {refused_variable}, which no check sets")
    if not lines or not isinstance(lines[0], Header):
        raise UsageError(f"{path_text}: not a ddpdiag recording: its first line is not a header")
    if lines[0].schema != SCHEMA:
        raise UsageError(f"{path_text} has schema {lines[0].schema!r}; this ddpdiag reads {SCHEMA!r}")
    return lines


def _rows(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. A line above MAX_LINE_BYTES is cut. Raises UsageError if the file cannot be read."""
    bytes_left = MAX_RECORDING_BYTES
    try:
        with open_file(path) as file:
            while row := file.readline(MAX_LINE_BYTES + 1):
                bytes_left -= len(row)
                if bytes_left < 0:
                    raise OSError(
                        errno.EFBIG, f"it has more than {MAX_RECORDING_BYTES >> 30} GiB, the most that is read"
                    )
                yield row
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read recording {readable(str(path))}: {reason}") from error


def assemble(lines: Iterable[Line], problems: Iterable[str] = ()) -> Recording:
    """Build a recording from the records in `lines`. A record that is in two files counts once.

    Rank 0's header is used if it is among the lines, because only it says how ranks are authenticated. Raises
    UsageError if the records belong to different runs, or if there is no header.
    """
    records_by_type: dict[type, list[Any]] = defaultdict(list)
    for line in lines:
        records_by_type[type(line)].append(line)
    headers: list[Header] = records_by_type[Header]
    if not headers:
        raise UsageError("no recording given")
    if len(runs := {header.run_id for header in headers}) > 1:
        raise UsageError(f"the files belong to different runs: {', '.join(sorted(runs))}; give the files of one run")
    arrivals = _sorted_by_key({a.place.rank: a for a in reversed(records_by_type[Arrival])})
    trials = _merge_trials(records_by_type[Trial])
    outcomes = _sorted_by_key({(o.trial, o.rank): o for o in reversed(records_by_type[Outcome])})
    skips = {skip.code: skip for skip in records_by_type[Skip]}
    return Recording(
        header=next((header for header in headers if header.authentication), headers[0]),
        arrivals=arrivals,
        trials=tuple(trials.values()),
        outcomes=tuple(outcomes.values()),
        events=tuple({encode_line(event): event for event in records_by_type[Event]}.values()),
        skips=tuple(skips.values()),
        end=records_by_type[End][-1] if records_by_type[End] else None,
        problems=tuple(problems),
    )


def extend(recording: Recording, lines: Sequence[Line]) -> Recording:
    """Return the recording that `assemble` builds from the records of `recording` and `lines`.

    This is fast if `lines` come after all records of `recording`: a coordinator calls it some hundred times in a run.
    """
    new = assemble([recording.header, *lines])
    is_appended = _follows([t.number for t in recording.trials], [t.number for t in new.trials]) and _follows(
        [(o.trial, o.rank) for o in recording.outcomes[-1:]], [(o.trial, o.rank) for o in new.outcomes[:1]]
    )
    if not is_appended or not recording.arrivals.keys().isdisjoint(new.arrivals):
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


def _follows(old: Sequence[K], new: Sequence[K]) -> bool:
    """Whether all keys of `new` are greater than those of `old`. Both sequences are sorted."""
    return not old or not new or old[-1] < new[0]


def _merge_trials(trials: Iterable[Trial]) -> dict[int, Trial]:
    """Merge the records of each trial, since a rank's record has only that rank's group. Returns trials by number."""
    first: dict[int, Trial] = {}
    groups: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for trial in trials:
        first.setdefault(trial.number, trial)
        groups[trial.number].update(trial.groups)
    # If the first record of a trial has all of its groups, their order is kept.
    split = {number: trial for number, trial in first.items() if len(groups[number]) != len(trial.groups)}
    first |= {number: structs.replace(trial, groups=tuple(sorted(groups[number]))) for number, trial in split.items()}
    return dict(sorted(first.items()))


def _sorted_by_key(lines: dict[K, T]) -> dict[K, T]:
    """Sort records by key. Callers insert records in reverse order, so that the first of two with one key is kept."""
    return dict(sorted(lines.items()))


def disassemble(recording: Recording) -> Iterator[Line]:
    """Yield the records of a recording. `assemble` builds the same recording from them, but without its problems."""
    yield recording.header
    yield from recording.arrivals.values()
    yield from recording.trials
    yield from recording.outcomes
    yield from recording.events
    yield from recording.skips
    if recording.end is not None:
        yield recording.end
