"""What is written is read back as what it was; what is damaged says so."""

import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError, Raw, Struct, structs
from seen import arrival_of

from ddpdiag import codec
from ddpdiag.errors import UsageError
from ddpdiag.model import End, Event, EventKind, Header, Kind, Outcome, RunOptions, Skip, Status, Trial


class Sample(Struct, frozen=True):
    loss: float
    label: str = ""
    maybe: float | None = None
    many: tuple[float, ...] = ()


def header(secret: str = "", run_id: str = "r", world_size: int = 2) -> Header:
    return Header(
        run_id=run_id,
        world_size=world_size,
        launcher="hand",
        options=RunOptions(),
        created="2026-01-01",
        version="0",
        authentication=secret,
    )


def lines() -> list[object]:
    trial = Trial(code="COL001", groups=((0, 1),), kind=Kind.TORCH, deadline_seconds=5, number=1)
    outcomes = [
        Outcome(trial=1, code="COL001", rank=rank, status=Status.DONE, data=Raw(codec.encode(Sample(math.nan))))
        for rank in (0, 1)
    ]
    event = Event(kind=EventKind.LEAVING, rank=1, seconds=1.5, detail="15")
    skip = Skip(code="GPU002", reason="no GPU", is_inapplicable=True)
    return [header(), arrival_of(0, 2), arrival_of(1, 2), trial, *outcomes, event, skip, End(seconds=2.5)]


def write(path: Path, *, cut: int = 0) -> Path:
    data = b"".join(map(codec.encode_line, lines()))
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.mark.parametrize(
    "loss",
    [b"1e308", b'"1e308"', b"-1e101", b"1e-320", b'1.0, "unknown": ' + b"[" * 100_000 + b"]" * 100_000],
    ids=lambda loss: loss[:20].decode(),
)
def test_a_number_that_no_machine_has_and_deep_nesting_are_refused(loss: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.decode(b'{"loss": ' + loss + b"}", Sample, min_magnitude=codec.SMALLEST_NUMBER)


FLOATS = st.floats().filter(
    lambda number: (
        not math.isfinite(number) or number == 0 or codec.SMALLEST_NUMBER <= abs(number) <= codec.LARGEST_NUMBER
    )
)


@given(FLOATS, st.none() | FLOATS, st.lists(FLOATS, max_size=3))
def test_every_float_survives(loss: float, maybe: float | None, many: list[float]) -> None:
    back = codec.decode(codec.encode(Sample(loss, maybe=maybe, many=tuple(many))), Sample)
    expected = [loss, maybe, *many]
    assert all(
        a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))
        for a, b in zip([back.loss, back.maybe, *back.many], expected, strict=True)
    )


def test_texts_of_numbers_and_nan_are_kept_and_text_that_is_no_utf8_is_spelled_out() -> None:
    assert codec.decode(b'{"loss": 1.0, "label": "5e400"}', Sample).label == "5e400"
    assert codec.encode(Sample(math.nan)) == b'{"loss":"nan","label":"","maybe":null,"many":[]}'
    assert codec.decode(codec.encode(Sample(1.0, label="a\udcffb")), Sample).label == "a\\udcffb"


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recording = codec.read_recording([write(tmp_path / "run.jsonl")])
    assert recording.problems == ()
    assert recording.end == End(seconds=2.5)
    assert [outcome.rank for outcome in recording.outcomes] == [0, 1]
    assert math.isnan(codec.decode(recording.outcomes[0].data, Sample).loss)
    assert codec.assemble(codec.disassemble(recording)) == recording


def test_an_outcome_without_data_is_a_line_of_json() -> None:
    outcome = Outcome(trial=1, code="COL001", rank=0, status=Status.HUNG)
    assert msgspec.json.decode(codec.encode_line(outcome), type=Outcome) == outcome


def test_a_recording_cut_in_a_line_is_read_up_to_there_and_says_so(golden, tmp_path: Path) -> None:
    recording = codec.read_recording([write(tmp_path / "run.jsonl", cut=5)])
    assert recording.end is None
    assert len(recording.outcomes) == 2
    golden(*recording.problems)


def test_a_damaged_line_in_the_middle_ends_the_reading_and_says_so(golden, tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    rows = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*rows[:4], b"\xff\xfe garbage", *rows[4:]]))
    recording = codec.read_recording([path])
    assert len(recording.trials) == 1
    assert not recording.outcomes
    golden(*(re.sub(r"\(.*\)", "(WHY)", note) for note in recording.problems))


@given(st.integers(1, 1200))
def test_wherever_it_is_cut_nothing_but_a_usage_error_is_raised(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "run.jsonl", cut=cut)
        try:
            recording = codec.read_recording([path])
        except UsageError:
            return
        assert recording.header.run_id == "r"


def test_parts_of_one_run_are_put_together_and_counted_once(tmp_path: Path) -> None:
    whole = lines()
    first, second = tmp_path / "rank-0.jsonl", tmp_path / "rank-1.jsonl"
    first.write_bytes(b"".join(map(codec.encode_line, [header("none"), *whole[1:5]])))
    second.write_bytes(b"".join(map(codec.encode_line, [header(), *whole[1:6]])))
    recording = codec.read_recording([second, first])
    assert recording.header.authentication == "none"
    assert (len(recording.arrivals), len(recording.trials), len(recording.outcomes)) == (2, 1, 2)


def test_each_ranks_own_groups_are_put_together_once() -> None:
    whole = Trial(code="COL001", groups=((2, 3), (0, 1)), kind=Kind.TORCH, deadline_seconds=5, number=1)
    parts = [structs.replace(whole, groups=(group,)) for group in ((2, 3), (0, 1), (2, 3))]
    first = header(world_size=4)
    assert codec.assemble([first, whole, *parts]).trials == (whole,)
    assert codec.assemble([first, *parts]).trials == (structs.replace(whole, groups=((0, 1), (2, 3))),)


@pytest.mark.parametrize("run_ids", [("a", "b"), ()], ids=["two runs", "a missing file"])
def test_files_that_are_not_of_one_run_are_refused(golden, tmp_path: Path, run_ids) -> None:
    paths = [tmp_path / name for name in run_ids]
    for path in paths:
        path.write_bytes(codec.encode_line(header(run_id=path.name)))
    with pytest.raises(UsageError) as caught:
        codec.read_recording(paths or [tmp_path / "gone.jsonl"])
    golden(str(caught.value).replace(str(tmp_path), "TMP"))


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"type":"end","seconds":1}\n', b"\x00" * 100])
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.jsonl"):
        codec.read_recording([path])


@given(st.lists(st.integers(0, 20), max_size=5))
def test_a_recording_that_grows_is_the_one_made_at_once(cuts: list[int]) -> None:
    first, *between, end = lines()
    trial, *others = between[2:]
    # Three trials on two ranks, with what happened between them.
    own = between[:2]
    for number in (1, 2, 3):
        numbered = [structs.replace(each, trial=number) if isinstance(each, Outcome) else each for each in others]
        own += [structs.replace(trial, number=number), *reversed(numbered)]  # type: ignore[type-var]
    own.append(end)
    grown, begin = codec.assemble([first]), 0  # type: ignore[list-item]
    for cut in [*sorted(cuts), len(own)]:
        grown = codec.extend(grown, own[begin:cut])  # type: ignore[arg-type]
        begin = max(begin, cut)
    assert grown == codec.assemble([first, *own])  # type: ignore[list-item]
