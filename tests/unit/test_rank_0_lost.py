"""The report that `ddpdiag judge DIRECTORY` makes when rank 0 was lost."""

from pathlib import Path

import pytest
from msgspec import structs
from seen import arrival_of

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import assemble, encode_line, read_recording
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.ending import recording_forms
from ddpdiag.judgement.reading import read_run
from ddpdiag.model import Event, EventKind, Header, Kind, Outcome, Recording, RunOptions, Status, Trial, Verdict
from ddpdiag.model.recording import Line

HEADER = Header(run_id="r", world_size=4, launcher="hand", options=RunOptions(), created="", version="0")
TRIAL = Trial(code="COL001", groups=((0, 1, 2, 3),), kind=Kind.TORCH, deadline_seconds=5, number=1)
ARRIVALS = [arrival_of(rank, 4) for rank in range(4)]
HUNG = [Outcome(trial=1, code="COL001", rank=rank, status=Status.HUNG, interrupted=True) for rank in (2, 3)]


def lost_rank_0(*reporters: int) -> list[Event]:
    return [Event(kind=EventKind.LOST, rank=0, seconds=8.0 + rank, detail="x", reporter=rank) for rank in reporters]


def ended(*lines: Line) -> Recording:
    return recording_forms(assemble([HEADER, *ARRIVALS, TRIAL, *lines])).recording


def test_a_rank_without_a_last_line_is_lost_too() -> None:
    run = ended(*HUNG, *lost_rank_0(2, 3))
    assert [event.rank for event in run.events] == [0, 0, 1]
    statuses = {outcome.rank: outcome.status for outcome in run.outcomes}
    assert statuses == {0: Status.UNHEARD, 1: Status.UNHEARD, 2: Status.HUNG, 3: Status.HUNG}
    assert run.end is not None


def test_an_earlier_loss_counts_once() -> None:
    run = ended(Event(kind=EventKind.LOST, rank=1, seconds=3.0), *HUNG, *lost_rank_0(2, 3))
    assert [event.seconds for event in run.events if event.rank == 1] == [3.0]
    assert {outcome.rank: outcome.status for outcome in run.outcomes}[1] is Status.UNHEARD


def test_a_rank_that_received_a_signal_is_a_bystander() -> None:
    run = ended(Event(kind=EventKind.LEAVING, rank=1, seconds=3.0, detail="15"), *HUNG, *lost_rank_0(2, 3))
    assert {event.rank for event in run.events if event.kind is EventKind.LOST} == {0}
    (outcome,) = (outcome for outcome in run.outcomes if outcome.rank == 1)
    assert (outcome.status, outcome.interrupted) == (Status.SKIPPED, True)


def test_a_run_with_rank_0_is_unchanged() -> None:
    recording = assemble([HEADER, *ARRIVALS, TRIAL])
    assert recording_forms(recording).recording is recording


def write(path: Path, *lines: Line) -> None:
    path.write_bytes(b"".join(map(encode_line, lines)))


def test_a_folder_of_records_is_judged_and_names_rank_0(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", structs.replace(HEADER, authentication="none"), *ARRIVALS, TRIAL)
    for rank, outcome in zip((1, 2, 3), (structs.replace(HUNG[0], rank=1), *HUNG), strict=True):
        write(tmp_path / f"rank-{rank}.jsonl", HEADER, ARRIVALS[rank], TRIAL, outcome, *lost_rank_0(rank))
    (tmp_path / "rank-9.jsonl").write_text("")
    recording = read_run(str(tmp_path))
    assert isinstance(recording, Recording)
    assert recording.header.authentication == "none"
    report = judge(recording, all_checks())
    assert (report.verdict, report.exit_code) == (Verdict.UNFIT, 1)
    blamed = {rank for finding in report.findings if finding.severity.value == "error" for rank in finding.ranks}
    assert blamed == {0}
    assert [note for note in report.recording_problems if "rank 0 was lost" in note and "ranks 1-3" in note], (
        report.recording_problems
    )


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no recording"):
        read_recording([tmp_path])
