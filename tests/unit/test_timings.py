"""Where a run's seconds went: the parts add up to the whole, and who was waited for is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import arrival_of

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import decode, encode, encode_line
from ddpdiag.judgement import judge
from ddpdiag.judgement.timings import timings_of
from ddpdiag.model import (
    IMPORT_STEP,
    Arrival,
    End,
    Event,
    EventKind,
    Header,
    Kind,
    Options,
    Outcome,
    Recording,
    Status,
    Trial,
)
from ddpdiag.model.recording import Line
from ddpdiag.model.report import Timings


def arrivals(seconds: list[float], *, up: float | None = None) -> dict[int, Arrival]:
    """Ranks that came at these seconds of the run."""
    size = len(seconds)
    return {
        rank: structs.replace(arrival_of(rank, size, ranks_per_node=1), seconds=came, up_seconds=up)
        for rank, came in enumerate(seconds)
    }


def trial(number: int, ranks: int, begin: float | None, code: str = "COL001", group: int | None = None) -> Trial:
    """A trial of that many ranks, in groups of `group`."""
    size = group or ranks
    groups = tuple(tuple(range(first, first + size)) for first in range(0, ranks, size))
    return Trial(code=code, groups=groups, kind=Kind.TORCH, deadline_seconds=9, number=number, begin_seconds=begin)


def outcome(rank: int, seconds: float, status: Status = Status.DONE, number: int = 1, **more: object) -> Outcome:
    code = str(more.pop("code", "COL001"))
    return Outcome(trial=number, code=code, rank=rank, status=status, seconds=seconds, **more)  # type: ignore[arg-type]


def recording(
    came: list[float],
    trials: tuple[Trial, ...] = (),
    outcomes: tuple[Outcome, ...] = (),
    *,
    end: End | None = None,
    events: tuple[Event, ...] = (),
    up: float | None = None,
) -> Recording:
    header = Header(
        run_id="r",
        world_size=len(came),
        launcher="hand",
        options=Options(),
        created="",
        version="0",
        checks=("COL001",),
    )
    return Recording(
        header=header, arrivals=arrivals(came, up=up), trials=trials, outcomes=outcomes, end=end, events=events
    )


def timings(run: Recording) -> Timings:
    return timings_of(run, all_checks())


def kinds(run: Recording, stage: str) -> dict[str, float]:
    """What a stage spent on what."""
    return next((row.kinds for row in timings(run).stages if row.stage == stage), {})


def waits(run: Recording) -> list[tuple[tuple[int, ...], float, int, str]]:
    return [(wait.ranks, pytest.approx(wait.seconds), wait.times, wait.code) for wait in timings(run).waits]


def adds_up(found: Timings) -> bool:
    """Is every row the sum of its kinds, and the whole that of the rows?"""
    rows = all(sum(row.kinds.values()) == pytest.approx(row.seconds) for row in found.stages)
    return rows and sum(row.seconds for row in found.stages) == pytest.approx(found.seconds)


# The frame -----------------------------------------------------------------------------------------------------------


def test_the_start_is_rank_0s_own_and_the_wait_for_who_came_last():
    run = recording([0.1, 0.2, 0.3, 5.3], end=End(seconds=6.0), up=0.4)
    assert kinds(run, "start") == pytest.approx({"start": 0.6, "wait": 5.1, "own": 0.7})
    assert timings(run).seconds == pytest.approx(6.4)
    (wait,) = timings(run).waits
    assert (wait.ranks, wait.hosts, wait.times, wait.code, wait.up_seconds) == ((3,), ("n3",), 1, "", 0.4)


def test_ranks_that_never_came_were_waited_for():
    lost = Event(kind=EventKind.ABSENT, rank=2, seconds=15.0)
    run = recording([0.0, 1.0], end=End(seconds=15.5), events=(lost,))
    assert kinds(run, "start") == pytest.approx({"wait": 15.0, "own": 0.5})
    assert waits(run) == [((2,), 15.0, 1, "")]


def test_what_lies_between_trials_is_our_own():
    trials = (trial(1, 1, 1.0), trial(2, 1, 3.0, code="TRN001"))
    outcomes = (
        outcome(0, 1.5, timings={"total": 1.5}),
        outcome(0, 2.0, number=2, code="TRN001", timings={"total": 2.0}),
    )
    run = recording([0.25], trials, outcomes, end=End(seconds=5.25))
    assert kinds(run, "start") == pytest.approx({"start": 0.25, "own": 0.75})
    assert kinds(run, "collective") == pytest.approx({"measure": 1.5, "own": 0.5})
    assert kinds(run, "training") == pytest.approx({"measure": 2.0, "own": 0.25})
    assert adds_up(timings(run))


def test_the_judgement_comes_after_the_end():
    run = recording([0.0], end=End(seconds=2.0, judge_seconds=0.5))
    assert kinds(run, "judgement") == {"own": 0.5}
    assert timings(run).seconds == 2.5


def test_an_old_recording_says_what_it_does_not_know():
    run = recording([0.5], (trial(1, 1, None),), (outcome(0, 2.0, timings={"total": 2.0}),), end=End(seconds=4.0))
    assert kinds(run, "collective") == {"measure": 2.0}
    assert kinds(run, "other") == {"unknown": 1.5}
    assert adds_up(timings(run))


def test_old_lines_decode_and_the_new_ones_are_kept():
    assert decode(b'{"type":"end","seconds":3.0}', Line) == End(seconds=3.0)
    line = trial(1, 2, 0.5)
    assert decode(encode_line(line), Line) == line


def test_a_trial_of_a_check_that_is_not_known_belongs_to_no_stage():
    run = recording([0.0], (trial(1, 1, 0.0, code="XYZ999"),), (outcome(0, 1.0, code="XYZ999"),), end=End(seconds=1.0))
    assert kinds(run, "other") == {"unknown": 1.0}


def test_a_recording_without_an_end_ends_with_what_is_known_last():
    run = recording([0.0], (trial(1, 1, 1.0),), (outcome(0, 2.0, timings={"total": 2.0}),))
    assert timings(run).seconds == 3.0
    assert adds_up(timings(run))


def test_a_recording_of_nothing_has_no_rows():
    assert timings(recording([0.0])) == Timings(seconds=0.0, stages=())


# One trial -----------------------------------------------------------------------------------------------------------


def test_a_trial_is_split_as_the_worker_timed_it():
    own = {"import": 1.0, "total": 3.0, "context": 0.5, "group": 0.25, "gate": 0.125, "arrive": 2.0}
    run = recording([0.0], (trial(1, 1, 0.0),), (outcome(0, 4.5, timings=own),), end=End(seconds=4.5))
    expected = {"import": 1.0, "start": 0.5, "context": 0.5, "group": 0.25, "measure": 2.125, "own": 0.125}
    assert kinds(run, "collective") == pytest.approx(expected)


def test_of_two_ranks_the_gate_is_a_wait_for_the_later_one():
    outcomes = (
        outcome(0, 3.0, timings={"total": 3.0, "arrive": 0.5, "gate": 2.01}),
        outcome(1, 3.0, timings={"total": 3.0, "arrive": 2.5, "gate": 0.01}),
    )
    run = recording([0.0, 0.0], (trial(1, 2, 0.0),), outcomes, end=End(seconds=3.0))
    assert kinds(run, "collective") == pytest.approx({"measure": 0.99, "wait": 2.0, "own": 0.01})
    assert waits(run) == [((1,), 2.0, 1, "COL001")]


def test_what_made_a_rank_late_is_told():
    outcomes = (
        outcome(0, 1.0, timings={"total": 0.5, "import": 0.5}),
        outcome(1, 4.0, timings={"total": 0.6, "import": 3.4}),
    )
    run = recording([0.0, 0.0], (trial(1, 2, 0.0, group=1),), outcomes, end=End(seconds=4.0))
    (wait,) = timings(run).waits
    assert (wait.ranks, wait.seconds, wait.why) == ((1,), pytest.approx(3.0), "import")


def test_who_ends_last_was_waited_for_and_is_counted_over_all_trials():
    trials = (trial(1, 4, 0.0, group=1), trial(2, 4, 5.0, code="HST001", group=1))
    outcomes = tuple(
        outcome(rank, 4.0 if rank == 2 else 1.0, number=number, code=code, timings={"total": 1.0})
        for number, code in ((1, "COL001"), (2, "HST001"))
        for rank in range(4)
    )
    run = recording([0.0] * 4, trials, outcomes, end=End(seconds=9.0))
    assert kinds(run, "collective") == pytest.approx({"measure": 1.0, "wait": 3.0, "own": 1.0})
    assert waits(run) == [((2,), 6.0, 2, "COL001")]


def test_in_a_group_that_ends_last_who_came_last_to_its_gate_is_named():
    late = {3: (6.0, 5.0, 0.0), 2: (6.0, 1.0, 4.0)}
    outcomes = tuple(
        outcome(rank, seconds, timings={"total": seconds, "arrive": arrive, "gate": gate})
        for rank in range(8)
        for seconds, arrive, gate in (late.get(rank, (2.0, 1.0, 0.0)),)
    )
    run = recording([0.0] * 8, (trial(1, 8, 0.0, group=2),), outcomes, end=End(seconds=6.0))
    assert waits(run) == [((3,), 4.0, 1, "COL001")]


def test_where_most_are_late_nobody_is_named():
    outcomes = tuple(outcome(rank, 1.0 if rank < 2 else 3.0, timings={"total": 1.0}) for rank in range(3))
    run = recording([0.0] * 3, (trial(1, 3, 0.0, group=1),), outcomes, end=End(seconds=3.0))
    assert waits(run) == [((2,), 2.0, 1, "COL001")]
    half = tuple(outcome(rank, 1.0 if rank < 20 else 3.0, timings={"total": 1.0}) for rank in range(40))
    run = recording([0.0] * 40, (trial(1, 40, 0.0, group=1),), half, end=End(seconds=3.0))
    assert waits(run) == [((), 2.0, 1, "COL001")]


def test_a_hang_is_time_in_a_trial_that_failed_and_names_nobody():
    outcomes = (
        outcome(0, 9.0, Status.HUNG, timings={"arrive": 1.0}),
        outcome(1, 10.0, Status.HUNG, timings={"arrive": 1.0}, told=True),
    )
    run = recording([0.0, 0.0], (trial(1, 2, 0.0),), outcomes, end=End(seconds=12.0))
    assert kinds(run, "collective") == pytest.approx({"failed": 10.0, "own": 2.0})
    assert waits(run) == []


def test_a_hanging_import_is_an_import():
    hung = outcome(0, 9.0, Status.HUNG, at=IMPORT_STEP)
    run = recording([0.0], (trial(1, 1, 0.0),), (hung,), end=End(seconds=9.0))
    assert kinds(run, "collective") == {"import": 9.0}


def test_times_that_no_clock_gives_are_nothing():
    strange = outcome(0, -1.0, timings={"total": float("nan"), "group": float("inf")})
    run = recording([0.0], (trial(1, 1, -3.0),), (strange,), end=End(seconds=1.0))
    assert kinds(run, "collective") == {"own": 1.0}


# Any recording -------------------------------------------------------------------------------------------------------

TIMES = st.floats(-1.0, 100.0) | st.sampled_from([0.0, float("nan"), float("inf")])
SPENT = st.dictionaries(st.sampled_from(["import", "arrive", "gate", "context", "group", "total"]), TIMES)


@st.composite
def any_recording(draw: st.DrawFn) -> Recording:
    """Any times in any order, as clocks and cut files may give them."""
    size = draw(st.integers(1, 5))
    trials, outcomes = [], []
    for number in range(draw(st.integers(0, 4))):
        code = draw(st.sampled_from(["COL001", "HST001", "XYZ999"]))
        group = draw(st.sampled_from([1, size]))
        trials.append(trial(number, size, draw(st.none() | TIMES), code, group))
        for rank in range(draw(st.integers(0, size))):
            status = draw(st.sampled_from(Status))
            outcomes.append(outcome(rank, draw(TIMES), status, number, code=code, timings=draw(SPENT)))
    end = draw(st.none() | st.builds(End, seconds=TIMES, judge_seconds=st.none() | TIMES))
    absent = draw(st.lists(st.builds(Event, kind=st.just(EventKind.ABSENT), rank=st.just(size), seconds=TIMES)))
    came = draw(st.lists(TIMES, min_size=size, max_size=size))
    return recording(
        came, tuple(trials), tuple(outcomes), end=end, events=tuple(absent[:1]), up=draw(st.none() | TIMES)
    )


@given(any_recording())
def test_the_parts_are_the_whole(run: Recording) -> None:
    found = timings(run)
    assert adds_up(found)
    assert all(seconds > 0 for row in found.stages for seconds in row.kinds.values())
    waited = sum(row.kinds.get("wait", 0.0) for row in found.stages)
    assert sum(wait.seconds for wait in found.waits) <= waited * (1 + 1e-9)
    assert all(wait.seconds > 0 for wait in found.waits)
    assert decode(encode(found), Timings) == found


def test_every_report_has_them() -> None:
    run = recording([0.0, 0.0], (trial(1, 2, 0.0),), (), end=End(seconds=1.0))
    assert judge(run, all_checks()).timings == timings(run)
