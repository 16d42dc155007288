"""The course of a run, rank by rank."""

from msgspec import structs
from seen import arrival_of

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import decode, encode
from ddpdiag.judgement.timings import MOST_RANKS, MOST_TRIALS, timeline_of
from ddpdiag.model import End, Event, EventKind, Header, Kind, Options, Outcome, Recording, Status, Trial
from ddpdiag.model.report import Timeline, Unfinished


def trial(number, ranks, begin=None, code="COL001", **more):
    return Trial(
        code=code,
        groups=(tuple(ranks),),
        kind=Kind.TORCH,
        deadline_seconds=9.0,
        number=number,
        begin_seconds=begin,
        **more,
    )


def outcome(rank, seconds, number=1, status=Status.DONE, **more):
    return Outcome(trial=number, code="COL001", rank=rank, status=status, seconds=seconds, **more)


def recording(size, *, came=(), trials=(), outcomes=(), events=(), end=None):
    arrivals = {
        rank: structs.replace(arrival_of(rank, size, ranks_per_node=1), seconds=dict(came).get(rank, 0.1))
        for rank in range(size)
        if dict(came).get(rank, 0.1) is not None
    }
    header = Header(run_id="r", world_size=size, launcher="hand", options=Options(), created="", version="0")
    return Recording(
        header=header, arrivals=arrivals, trials=trials, outcomes=outcomes, events=events, end=end and End(seconds=end)
    )


def course(run, blamed=()) -> Timeline:
    return timeline_of(run, all_checks(), frozenset(blamed))


def test_each_rank_has_its_seconds_of_each_trial():
    trials = (trial(1, (0, 1), 1.0), trial(2, (1,), 3.0, code="TRN001"))
    found = course(
        recording(2, trials=trials, outcomes=(outcome(0, 0.5), outcome(1, 1.5), outcome(1, 2.0, 2)), end=6.0)
    )
    assert [(bar.code, bar.stage, bar.begin_seconds, bar.seconds) for bar in found.trials] == [
        ("COL001", "collective", 1.0, 1.5),
        ("TRN001", "training", 3.0, 2.0),
    ]
    assert [lane.seconds for lane in found.lanes] == [(0.5, None), (1.5, 2.0)]
    assert found.trials[0].statuses == {"done": 2}
    assert found.seconds == 6.0


def test_an_old_recording_has_its_trials_one_after_the_other():
    trials = (trial(1, (0,)), trial(2, (0,)))
    found = course(recording(1, trials=trials, outcomes=(outcome(0, 2.0), outcome(0, 1.0, 2))))
    assert [bar.begin_seconds for bar in found.trials] == [0.1, 2.1]
    assert found.seconds == 3.1


def test_who_hung_never_came_or_was_lost_is_told():
    events = (
        Event(kind=EventKind.ABSENT, rank=2, seconds=15.0),
        Event(kind=EventKind.LOST, rank=1, seconds=4.0),
    )
    hung = outcome(0, 9.0, status=Status.HUNG, at="all_reduce: wait")
    run = recording(3, came={2: None}.items(), trials=(trial(1, (0, 1), 1.0),), outcomes=(hung,), events=events)
    zero, one, two = course(run).lanes
    assert zero.unfinished == (Unfinished(number=1, status="hung", at="all_reduce: wait"),)
    assert (one.gone_seconds, one.seconds) == (4.0, (None,))
    assert (two.arrived_seconds, two.host) == (None, "?")


def test_of_many_ranks_the_blamed_the_failed_and_the_late_are_shown():
    size = 100
    bad = outcome(70, 9.0, status=Status.RAISED)
    run = recording(size, came={50: 30.0}.items(), trials=(trial(1, range(size), 1.0),), outcomes=(bad,))
    found = course(run, blamed=(90,))
    ranks = [lane.rank for lane in found.lanes]
    assert len(ranks) == MOST_RANKS
    assert found.ranks_in_all == size
    assert ranks == sorted(ranks)
    assert {50, 70, 90} < set(ranks)


def test_what_may_fail_and_what_others_brought_about_speaks_against_nobody():
    size = 100
    told = outcome(99, 9.0, status=Status.HUNG, told=True)
    tried = outcome(98, 9.0, 2, status=Status.HUNG)
    trials = (trial(1, range(size), 1.0), trial(2, range(size), 2.0, may_fail=True))
    ranks = {lane.rank for lane in course(recording(size, trials=trials, outcomes=(told, tried))).lanes}
    assert ranks == set(range(MOST_RANKS))


def test_of_many_trials_the_longest_are_shown():
    trials = tuple(trial(number, (0,), float(number)) for number in range(1, 101))
    outcomes = tuple(outcome(0, 0.001 * number, number) for number in range(1, 101))
    found = course(recording(1, trials=trials, outcomes=outcomes))
    assert [bar.number for bar in found.trials] == list(range(101 - MOST_TRIALS, 101))
    assert found.trials_in_all == 100
    assert len(found.lanes[0].seconds) == MOST_TRIALS


def test_a_run_that_never_began_is_a_timeline():
    events = (Event(kind=EventKind.ABSENT, rank=10**9 - 1, seconds=1.0),)
    run = recording(1, events=events)
    run = structs.replace(run, header=structs.replace(run.header, world_size=10**9))
    found = course(run)
    assert found.ranks_in_all == 10**9
    assert found.lanes[-1].rank == 10**9 - 1


def test_it_reads_back_as_the_same():
    run = recording(1, trials=(trial(1, (0,), 1.0),), outcomes=(outcome(0, 9.0, status=Status.HUNG, at="x"),))
    assert decode(encode(course(run)), Timeline) == course(run)
