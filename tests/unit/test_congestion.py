"""What is shared by hosts that are slow together: played against simulated fleets, and on pure data."""

import random
from collections.abc import Mapping

import pytest

from ddpdiag.checks.fabric.search import clusters, search_pairs
from ddpdiag.checks.fabric.search_data import Diagnosis, Phase, Result, Round, Rules
from ddpdiag.checks.registry import all_checks
from ddpdiag.judgement import judge
from ddpdiag.model import Report, RunOptions, Severity
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, host_name, simulate

USUAL = 100e9
QUIET = Noise(sigma=0.01, transients=0.0)
IN_LEAVES = 16


def searched(fleet: Fleet, leaves: Mapping[int, int] | None = None) -> tuple[Diagnosis, list[Round]]:
    """The diagnosis of a search, and its rounds."""
    search = search_pairs(range(fleet.hosts), leaves, Rules(), seed=7)
    rounds: list[Round] = []
    try:
        step = next(search)
        while True:
            rounds.append(step)
            fleet.next_round(step.groups)
            step = search.send({group: Result(fleet.rate(group)) for group in step.groups})
    except StopIteration as end:
        return end.value, rounds


def leaves_of(fleet: Fleet) -> dict[int, int]:
    return {host: fleet.leaf_of(host) for host in range(fleet.hosts)}


def fleet_of(hosts: int, *kinds: tuple[Fault, int], seed: int = 0) -> Fleet:
    return Fleet(hosts, Faults(kinds), QUIET, seed=seed, hosts_per_leaf=IN_LEAVES)


def named(found: Diagnosis) -> set[int]:
    return {bad.unit for bad in found.bad}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_hosts_behind_a_narrow_uplink_are_not_blamed_and_slow_ones_are(known, seed):
    fleet = fleet_of(512, (Fault.SLOW_HOST, 5), (Fault.UPLINK, 1), seed=seed)
    (narrow,) = fleet.narrow_leaves
    found, rounds = searched(fleet, leaves_of(fleet) if known else None)
    assert named(found) == fleet.failing
    (part,) = found.congested
    assert {fleet.leaf_of(host) for host in part.units} == {narrow}
    assert len(part.units) >= IN_LEAVES - 2  # but for slow ones, and those that passed with a neighbour
    assert part.domain == (narrow if known else None)
    assert len(rounds) <= 10


def test_one_suspect_costs_two_rounds():
    found, rounds = searched(fleet_of(512, (Fault.SLOW_HOST, 1)))
    assert len(found.bad) == 1
    assert sum(step.phase is Phase.QUIET for step in rounds) == 2


class Slow(Fleet):
    """All that goes to these hosts is slow, from a round on."""

    def __init__(self, hosts: int, members: range, since: int = 0) -> None:
        super().__init__(hosts, noise=QUIET, hosts_per_leaf=IN_LEAVES)
        self.members, self.since, self.number = set(members), since, 0

    def next_round(self, groups=()) -> None:
        self.number += 1

    def rate(self, group, inside=()) -> float:
        slow = self.number > self.since and not self.members.isdisjoint(group)
        return super().rate(group, inside) * (0.6 if slow else 1)


@pytest.mark.parametrize("known", [True, False])
def test_neighbours_that_are_slow_together_are_a_part_of_the_fabric(known):
    fleet = Slow(512, range(32, 48))
    found, _ = searched(fleet, leaves_of(fleet) if known else None)
    assert not found.bad
    assert [(part.domain, part.units) for part in found.congested] == [(2 if known else None, tuple(range(32, 48)))]


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_slow_hosts_among_fast_neighbours_are_at_fault(count):
    found, _ = searched(Slow(512, range(32, 32 + count)))
    assert (named(found), found.congested) == ({*range(32, 32 + count)}, ())


@pytest.mark.parametrize("known", [True, False])
def test_witnesses_show_that_a_suspect_shares_its_slowness(known):
    # One host failed by itself while its neighbours passed; then all of the leaf become slow.
    class Late(Slow):
        def rate(self, group, inside=()) -> float:
            return super().rate(group, inside) * (0.6 if self.number <= self.since and 40 in group else 1)

    fleet = Late(2048, range(32, 48), since=4)
    found, _ = searched(fleet, leaves_of(fleet) if known else None)
    assert not found.bad
    (part,) = found.congested
    assert 40 in part.units
    assert len(part.units) >= 4


class Trunk(Fleet):
    """Two halves with one trunk between them, which carries one pair at a time at full rate, times `share`."""

    def __init__(self, hosts: int, share: float = 1.0) -> None:
        super().__init__(hosts, noise=QUIET, hosts_per_leaf=hosts // 2)
        self.share, self.crossing = share, 0

    def next_round(self, groups: object = ()) -> None:
        self.crossing = sum(self.crosses(group) for group in groups)  # type: ignore[attr-defined]

    def crosses(self, group) -> bool:
        return len({self.leaf_of(host) for host in group}) > 1

    def rate(self, group, inside=()) -> float:
        return super().rate(group, inside) * (self.share / max(1, self.crossing) if self.crosses(group) else 1)


@pytest.mark.parametrize(("hosts", "share"), [(8, 0.5), (16, 1.0), (32, 0.4), (64, 0.4), (128, 1.0)])
def test_a_bottleneck_between_two_groups_blames_no_host_and_no_pair(hosts, share):
    found, rounds = searched(Trunk(hosts, share))
    assert not found.bad
    assert not found.paths
    (part,) = found.congested
    assert part.is_between
    assert [own.rate for own in part.quiet_tests] == pytest.approx([share * USUAL] * 2, rel=0.1)
    assert len(rounds) <= 10


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_no_cut(seed):
    fleet = Fleet(8, Faults(((Fault.SLOW_LINK, 1),), 0.5), Noise(0.02, 0.01), seed=seed)
    assert searched(fleet)[0].congested == ()


def test_a_row_is_what_chance_does_not_make():
    units = range(16_384)
    chosen = random.Random(1).sample(units, 164)
    assert clusters(sorted(chosen), units, 0.05) == []
    row = list(range(5000, 5032))
    (found,) = clusters(sorted({*chosen, *row}), units, 0.05)
    assert set(found) >= set(row)
    assert clusters([3, 4, 5, 6], range(16), 0.05) == []  # four of 16 may be four slow hosts


def judged(fleet: Fleet, **options: object) -> Report:
    own = RunOptions(stages=("fabric",), backend="nccl", **options)  # type: ignore[arg-type]
    return judge(simulate(fleet, options=own), all_checks())


def test_a_congested_part_is_a_warning_with_the_hosts_behind_it(golden):
    report = judged(fleet_of(128, (Fault.UPLINK, 1)))
    (finding,) = (own for own in report.findings if own.code == "FAB001.congested")
    assert (finding.severity, finding.hosts, finding.ranks) == (Severity.WARNING, (), ())
    assert len(finding.evidence["hosts"]) >= 3
    assert finding.evidence["quiet_bytes_per_s"] > 0.9 * USUAL > finding.evidence["loaded_bytes_per_s"]
    assert (report.exit_code, report.hosts.failing, len(report.hosts.healthy)) == (0, (), 128)
    golden(finding)


def test_a_bottleneck_between_two_groups_is_named_with_its_hosts(golden):
    report = judged(Trunk(8, 0.4))
    (finding,) = (own for own in report.findings if own.code == "FAB001.congested")
    assert finding.evidence["hosts"] == [*map(host_name, range(8))]
    assert finding.severity is Severity.ERROR
    assert not any(own.hosts or own.links for own in report.findings)
    golden(finding)


def test_two_hosts_of_a_leaf_are_undecided(golden):
    leaves = {host: 0 if host < 2 else 1 + host % 4 for host in range(64)}
    found, _ = searched(Slow(64, range(2)), leaves)
    assert (named(found), found.undecided) == (set(), (0, 1))
    topology = {host_name(host): f"leaf{leaf}" for host, leaf in leaves.items()}
    report = judged(Slow(64, range(2)), topology=topology)
    (finding,) = (own for own in report.findings if own.code == "FAB001.undecided")
    assert finding.evidence["hosts"] == ["n0000", "n0001"]
    golden(finding)
