"""The search among hosts where some are lost before it or in the middle of it; and when it is done at all."""

from collections.abc import Mapping

import pytest
from msgspec import Raw, structs
from searches import USUAL
from searches import searched as searched_by
from seen import seen_of, skip_text, world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.world import World
from ddpdiag.judgement import judge
from ddpdiag.model import Depth, Event, EventKind, Outcome, Recording, RunOptions, Severity, Status, Trial
from ddpdiag.model.recording import End
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, host_name, outcomes_of, simulate

QUIET = Noise(sigma=0.005, transients=0.0)
RANKS = 2  # a host


def searched(fleet: Fleet, lost: Mapping[int, int]) -> Recording:
    """A run in which each host of `lost` is lost in the trial of that number (0: before the first)."""
    empty = simulate(Fleet(fleet.hosts), ranks_per_host=RANKS)
    header, arrivals = empty.header, empty.arrivals
    trials: list[Trial] = []
    outcomes: list[Outcome] = []
    while True:
        gone = {rank for host, number in lost.items() if number <= len(trials) for rank in ranks_of(host)}
        world = World(
            size=len(arrivals),
            launcher="simulated",
            options=header.options,
            arrivals=arrivals,
            inactive_ranks=frozenset(gone),
        )
        known = Recording(header=header, arrivals=arrivals, trials=tuple(trials), outcomes=tuple(outcomes))
        planned = fab001.CHECK.plan(Seen(world, fab001.CHECK, known))
        if not planned:
            events = tuple(
                Event(kind=EventKind.LOST, rank=rank, seconds=1.0, host=host_name(host))
                for host in lost
                for rank in ranks_of(host)
            )
            return structs.replace(known, events=events, end=End(seconds=30.0))
        (trial,) = planned
        assert gone.isdisjoint(trial.ranks)
        trial = structs.replace(trial, number=len(trials) + 1)
        trials.append(trial)
        now = {rank for host, number in lost.items() if number == trial.number for rank in ranks_of(host)}
        outcomes += [unheard(own, trial, now) for own in outcomes_of(fleet, trial, RANKS)]


def ranks_of(host: int) -> range:
    return range(host * RANKS, (host + 1) * RANKS)


def unheard(own: Outcome, trial: Trial, gone: set[int]) -> Outcome:
    """Whoever is lost says nothing, and its peers are told to stop."""
    if own.rank in gone:
        return structs.replace(own, status=Status.UNHEARD, data=Raw(b"null"))
    if gone.intersection(trial.group_of(own.rank)):
        return structs.replace(own, status=Status.HUNG, interrupted=True, data=Raw(b"null"))
    return own


def codes(recording: Recording) -> dict[str, tuple[str, ...]]:
    report = judge(recording, all_checks())
    return {finding.code: finding.hosts for finding in report.findings if finding.code.startswith("FAB")}


def test_a_host_that_was_lost_before_takes_no_part_and_the_others_get_their_verdict(golden) -> None:
    fleet = Fleet(12, Faults(((Fault.SLOW_HOST, 1),), 0.5), QUIET, seed=3)
    (slow,) = fleet.failing
    gone = (slow + 1) % 12
    recording = searched(fleet, {gone: 0})
    assert codes(recording)["FAB001.host"] == (host_name(slow),)
    assert not any(set(ranks_of(gone)) & set(trial.ranks) for trial in recording.trials)
    report = judge(recording, all_checks())
    assert set(report.hosts.failing) == {host_name(gone)}
    golden(*(finding for finding in report.findings if finding.code == "FAB001.clear"))


@pytest.mark.parametrize("number", range(1, 6))
def test_a_host_that_is_lost_in_the_middle_costs_the_others_nothing(number: int) -> None:
    recording = searched(Fleet(12, noise=QUIET, seed=number), {5: number})
    assert len(recording.trials) >= number
    report = judge(recording, all_checks())
    assert set(report.hosts.failing) == {host_name(5)}
    assert set(report.hosts.healthy) == {host_name(host) for host in range(12) if host != 5}
    assert {code for code in codes(recording) if code not in ("FAB001.host", "FAB001.alone")} <= {"FAB001.clear"}
    # The proof is that of the others.
    proof = recording.trials[-1]
    assert proof.params["phase"] == "verify"
    assert {rank // RANKS for rank in proof.ranks} == {*range(12)} - {5}


@pytest.mark.parametrize(
    ("hosts", "status", "depth", "is_done"),
    [
        (3, Status.HUNG, Depth.QUICK, True),
        (16, Status.DIED, Depth.QUICK, True),
        (17, Status.DONE, Depth.QUICK, True),
        (3, Status.DONE, Depth.STANDARD, True),
        (2, Status.HUNG, Depth.QUICK, False),
        (16, Status.DONE, Depth.QUICK, False),
    ],
)
def test_a_quick_check_of_few_hosts_searches_where_the_all_reduce_failed(golden, hosts, status, depth, is_done):
    statuses = dict.fromkeys(range(RANKS * hosts), status)
    options = RunOptions(backend="gloo", depth=depth)
    reduced = seen_of(all_reduce.CHECK, {}, statuses=statuses, params={"backend": "gloo"}, options=options)
    seen = reduced.of(fab001.CHECK)
    reason = skip_text(fab001.CHECK, seen)
    assert (reason is None, bool(fab001.CHECK.plan(seen))) == (is_done, is_done)
    golden(*([] if reason is None else [reason]))


def test_of_two_hosts_one_left_makes_no_pair(golden):
    every, no_host, one = (
        world_of(4, ranks_per_node=RANKS, options=RunOptions(backend="gloo", depth=Depth.STANDARD), out=frozenset(lost))
        for lost in ((), (3,), (2, 3))
    )
    assert skip_text(fab001.CHECK, every) is skip_text(fab001.CHECK, no_host) is None
    golden(skip_text(fab001.CHECK, one))


@pytest.mark.parametrize(
    ("rate", "severity"),
    [
        pytest.param(lambda group: 1e6, Severity.ERROR, id="all are below the least rate"),
        pytest.param(lambda group: None, Severity.ERROR, id="no pair ends"),
        pytest.param(
            lambda group: USUAL if max(group) < 2 else USUAL / 10, Severity.WARNING, id="most are below the best"
        ),
    ],
)
def test_of_many_slow_hosts_none_is_blamed(golden, rate, severity):
    seen = searched_by(fab001.CHECK, rate, ranks=8, ranks_per_node=1, stages=("fabric",))
    (finding,) = fab001.CHECK.judge(seen)
    assert (finding.code, finding.severity, finding.ranks, finding.hosts) == ("FAB001.systemic", severity, (), ())
    golden(finding)


@pytest.mark.parametrize(
    ("ranks", "rate", "word", "hosts"),
    [
        pytest.param(2, lambda group: 1e6, "undecided", (), id="two slow hosts"),
        pytest.param(3, lambda group: None if 2 in group else USUAL, "host", ("n2",), id="one that fails"),
        pytest.param(4, lambda group: USUAL if len(group) == 2 else None, "unproven", (), id="only all together fail"),
    ],
)
def test_a_host_is_blamed_only_if_it_fails_with_several_partners(golden, ranks, rate, word, hosts):
    seen = searched_by(fab001.CHECK, rate, ranks=ranks, ranks_per_node=1, stages=("fabric",))
    found = {finding.code: finding for finding in fab001.CHECK.judge(seen)}[f"FAB001.{word}"]
    assert (found.ranks, found.hosts) == ((), hosts)
    golden(found)
