"""What is written is read back as what it was; what is damaged says so."""

import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError, Raw, Struct, ValidationError, structs

from ddpdiag.codec import (
    LARGEST_NUMBER,
    SMALLEST_NUMBER,
    assemble,
    decode,
    disassemble,
    encode,
    encode_line,
    extend,
    read_recording,
)
from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, End, Event, EventKind, Header, Kind, Options, Outcome, Place, Skip, Status, Trial


class Sample(Struct, frozen=True):
    loss: float
    label: str = ""
    maybe: float | None = None
    many: tuple[float, ...] = ()


def header(secret: str = "", run_id: str = "r") -> Header:
    return Header(
        run_id=run_id,
        world_size=2,
        launcher="hand",
        options=Options(),
        created="2026-01-01",
        version="0",
        secret=secret,
    )


def arrival(rank: int) -> Arrival:
    place = Place(rank=rank, world_size=2, host="n0", launcher="hand")
    return Arrival(place=place, host_id="b", pid=rank, address="127.0.0.1")


def lines() -> list[object]:
    trial = Trial(code="COL001", groups=((0, 1),), kind=Kind.TORCH, deadline_seconds=5, number=1)
    outcomes = [
        Outcome(trial=1, code="COL001", rank=rank, status=Status.DONE, data=Raw(encode(Sample(math.nan))))
        for rank in (0, 1)
    ]
    event = Event(kind=EventKind.LEAVING, rank=1, seconds=1.5, detail="15")
    skip = Skip(code="GPU002", reason="no GPU", grounds=True)
    return [header(), arrival(0), arrival(1), trial, *outcomes, event, skip, End(seconds=2.5)]


def write(path: Path, *, cut: int = 0) -> Path:
    data = b"".join(map(encode_line, lines()))
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.mark.parametrize("number", ["1e308", '"1e308"', "-1e101", "1e-320"])
def test_a_number_that_no_machine_has_is_refused(number: str) -> None:
    with pytest.raises(ValidationError):
        decode(f'{{"loss": {number}}}'.encode(), Sample, least=SMALLEST_NUMBER)


def test_what_only_looks_like_such_a_number_is_read() -> None:
    assert decode(b'{"loss": 1.0, "label": "5e400"}', Sample).label == "5e400"


def test_what_is_nested_deep_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode(b'{"loss": 1.0, "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Sample)


FLOATS = st.floats().filter(
    lambda number: not math.isfinite(number) or number == 0 or SMALLEST_NUMBER <= abs(number) <= LARGEST_NUMBER
)


@given(FLOATS, st.none() | FLOATS, st.lists(FLOATS, max_size=3))
def test_every_float_survives(loss: float, maybe: float | None, many: list[float]) -> None:
    back = decode(encode(Sample(loss, maybe=maybe, many=tuple(many))), Sample)
    expected = [loss, maybe, *many]
    assert all(
        a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))
        for a, b in zip([back.loss, back.maybe, *back.many], expected, strict=True)
    )


def test_nan_is_not_written_as_null() -> None:
    assert encode(Sample(math.nan)) == b'{"loss":"nan","label":"","maybe":null,"many":[]}'


def test_text_that_is_no_utf8_is_spelled_out() -> None:
    assert decode(encode(Sample(1.0, label="a\udcffb")), Sample).label == "a\\udcffb"


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording = read_recording([write(tmp_path / "run.jsonl")])
    assert recording.notes == ()
    assert recording.end == End(seconds=2.5)
    assert [outcome.rank for outcome in recording.outcomes] == [0, 1]
    assert math.isnan(decode(recording.outcomes[0].data, Sample).loss)
    assert assemble(disassemble(recording)) == recording


def test_an_outcome_without_data_is_a_line_of_json() -> None:
    outcome = Outcome(trial=1, code="COL001", rank=0, status=Status.HUNG)
    assert msgspec.json.decode(encode_line(outcome), type=Outcome) == outcome


def test_a_recording_cut_in_a_line_is_read_up_to_there_and_says_so(golden, tmp_path: Path) -> None:
    recording = read_recording([write(tmp_path / "run.jsonl", cut=5)])
    assert recording.end is None
    assert len(recording.outcomes) == 2
    golden(*recording.notes)


def test_a_damaged_line_in_the_middle_ends_the_reading_and_says_so(golden, tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    rows = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*rows[:4], b"\xff\xfe garbage", *rows[4:]]))
    recording = read_recording([path])
    assert len(recording.trials) == 1
    assert not recording.outcomes
    golden(*(re.sub(r"\(.*\)", "(WHY)", note) for note in recording.notes))


@given(st.integers(1, 1200))
def test_wherever_it_is_cut_nothing_but_a_usage_error_is_raised(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "run.jsonl", cut=cut)
        try:
            recording = read_recording([path])
        except UsageError:
            return
        assert recording.header.run_id == "r"


def test_parts_of_one_run_are_put_together_and_counted_once(tmp_path: Path) -> None:
    whole = lines()
    first, second = tmp_path / "rank-0.jsonl", tmp_path / "rank-1.jsonl"
    first.write_bytes(b"".join(map(encode_line, [header("none"), *whole[1:5]])))
    second.write_bytes(b"".join(map(encode_line, [header(), *whole[1:6]])))
    recording = read_recording([second, first])
    assert recording.header.secret == "none"
    assert (len(recording.arrivals), len(recording.trials), len(recording.outcomes)) == (2, 1, 2)


def test_each_ranks_own_groups_are_put_together_once() -> None:
    header = Header(run_id="r", world_size=4, launcher="hand", options=Options(), created="", version="0")
    whole = Trial(code="COL001", groups=((2, 3), (0, 1)), kind=Kind.TORCH, deadline_seconds=5, number=1)
    parts = [structs.replace(whole, groups=(group,)) for group in ((2, 3), (0, 1), (2, 3))]
    assert assemble([header, whole, *parts]).trials == (whole,)
    assert assemble([header, *parts]).trials == (structs.replace(whole, groups=((0, 1), (2, 3))),)


def test_parts_of_two_runs_are_refused(golden, tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(encode_line(header(run_id=name)))
    with pytest.raises(UsageError) as caught:
        read_recording(paths)
    golden(str(caught.value).replace(str(tmp_path), "TMP"))


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"type":"end","seconds":1}\n', b"\x00" * 100])
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.jsonl"):
        read_recording([path])


def test_a_missing_file_is_named(golden, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_recording([tmp_path / "gone.jsonl"])
    golden(str(caught.value).replace(str(tmp_path), "TMP"))


def many_lines() -> list[object]:
    """Three trials on two ranks, with what happened between them."""
    found: list[object] = [arrival(0), arrival(1)]
    for number in (1, 2, 3):
        found.append(Trial(code="COL001", groups=((0, 1),), kind=Kind.PLAIN, deadline_seconds=5, number=number))
        found += [Outcome(trial=number, code="COL001", rank=rank, status=Status.DONE) for rank in (1, 0)]
        found.append(Event(kind=EventKind.LEAVING, rank=1, seconds=1.5, detail="15"))
        found.append(Skip(code="GPU002", reason=f"reason {number}", grounds=True))
    return [*found, End(seconds=2.5)]


@given(st.lists(st.integers(0, 20), max_size=5))
def test_a_recording_that_grows_is_the_one_made_at_once(cuts: list[int]) -> None:
    own = many_lines()
    grown, begin = assemble([header()]), 0
    for end in [*sorted(cuts), len(own)]:
        grown = extend(grown, own[begin:end])  # type: ignore[arg-type]
        begin = max(begin, end)
    assert grown == assemble([header(), *own])  # type: ignore[list-item]
