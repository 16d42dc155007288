"""A fleet of hosts with faults and noise: what a group of them would reach, and the recording of a whole run.

Seeded, so that a run can be repeated. A group is as slow as its slowest member or link, times noise. Transients halve a
test at random; a congested leaf halves, for as long as it lasts, all that goes there. A leaf with
narrow uplinks is congested by the tests themselves: it carries half of what its hosts can send. Nothing is measured and
nothing waits; the recording is one as any other: `ddpdiag judge` reads it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from msgspec import Raw, json, structs

from ddpdiag.bandwidth import factor
from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric import gpus
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.fabric.rounds import Data
from ddpdiag.checks.world import World
from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, Options, Outcome, Place, Recording, Skip, Status, Trial
from ddpdiag.model.recording import End, Header
from ddpdiag.stats import Samples

# A leaf switch has so many hosts by default.
HOSTS_PER_LEAF = 32
# On a host that is slow inside it is the GPU of this local rank.
SLOW_LOCAL_RANK = 1
_TRANSIENT_SHARE = 0.5
_CONGESTED_SHARE = 0.5
# A narrow uplink carries what so many of its hosts can send.
_NARROW_SHARE = 0.5


class Fault(Enum):
    """The faults of a fleet."""

    NONE = "none"
    SLOW_HOST = "slow-host"  # with every partner; its ranks among themselves are as quick as others
    SLOW_INSIDE = "slow-inside"  # one of its GPUs: alone and with every partner
    DEAD_HOST = "dead-host"  # its processes end in the first test
    HANG = "hang"  # no test with it ends
    SLOW_LINK = "slow-link"  # one pair of hosts
    UPLINK = "uplink"  # the uplinks of one leaf carry half of what its hosts can send; no host is at fault
    LEAF = "leaf"  # half of the hosts of one leaf are slow


class Faults(NamedTuple):
    """The number of each fault, and the slowdown of slow hosts as a share."""

    kinds: tuple[tuple[Fault, int], ...] = ()
    slower: float = 0.25


class Noise(NamedTuple):
    """The noise of tests.

    `sigma` is a normal deviation as a share of the rate, `transients` the share of tests that are slow for no reason,
    `congested` the share of leaves on which congestion begins in a round; it lasts with the probability `lasting`.
    """

    sigma: float = 0.02
    transients: float = 0.01
    congested: float = 0.0
    lasting: float = 0.5


HEALTHY = Faults()
USUAL_NOISE = Noise()


class Fleet:
    """Hosts numbered from 0, of `hosts_per_leaf` on each leaf switch. `usual` is bus bandwidth in bytes per second."""

    def __init__(
        self,
        hosts: int,
        faults: Faults = HEALTHY,
        noise: Noise = USUAL_NOISE,
        *,
        seed: int = 0,
        usual: float = 100e9,
        hosts_per_leaf: int = HOSTS_PER_LEAF,
    ) -> None:
        self.hosts = hosts
        self.noise = noise
        self.usual = usual
        self.hosts_per_leaf = hosts_per_leaf
        self.slower = faults.slower
        self.level = 1.0
        self.slow: set[int] = set()
        self.slow_inside: set[int] = set()
        self.hanging: set[int] = set()
        self.dead: set[int] = set()
        self.links: set[frozenset[int]] = set()
        self.narrow: set[int] = set()
        self._random = Random(seed)
        self._congested: set[int] = set()
        self._leaving: Counter[int] = Counter()
        for kind, count in faults.kinds:
            self._break(kind, count)

    @property
    def failing(self) -> frozenset[int]:
        """The hosts that should be blamed."""
        return frozenset(self.slow | self.slow_inside | self.hanging | self.dead)

    def _break(self, kind: Fault, count: int) -> None:
        hosts = {
            Fault.SLOW_HOST: self.slow,
            Fault.SLOW_INSIDE: self.slow_inside,
            Fault.HANG: self.hanging,
            Fault.DEAD_HOST: self.dead,
        }
        if kind in hosts:
            hosts[kind].update(self._choose(count))
            return
        match kind:
            case Fault.SLOW_LINK:
                if count > (pairs := self.hosts * (self.hosts - 1) // 2):
                    raise UsageError(f"{count} slow links were asked for, and {self.hosts} hosts have {pairs} pairs")
                while len(self.links) < count:
                    self.links.add(frozenset(self._random.sample(range(self.hosts), 2)))
            case Fault.LEAF:
                for leaf in self._choose_leaves(count):
                    first, size = leaf * self.hosts_per_leaf, self.hosts_per_leaf
                    self.slow.update(range(first, min(self.hosts, first + size), 2))
            case Fault.UPLINK:
                self.narrow.update(self._choose_leaves(count))

    def _choose(self, count: int) -> list[int]:
        free = [host for host in range(self.hosts) if host not in self.failing]
        if count > len(free):
            raise UsageError(f"{count} failing hosts were asked for, and {len(free)} of {self.hosts} hosts are left")
        return self._random.sample(free, count)

    def _choose_leaves(self, count: int) -> list[int]:
        if count > self._leaves:
            raise UsageError(f"{count} failing leaves were asked for, and {self.hosts} hosts have {self._leaves}")
        return self._random.sample(range(self._leaves), count)

    @property
    def _leaves(self) -> int:
        return -(-self.hosts // self.hosts_per_leaf)

    def leaf_of(self, host: int) -> int:
        """The number of its leaf switch."""
        return host // self.hosts_per_leaf

    def next_round(self, groups: Sequence[Sequence[int]] = ()) -> None:
        """Congestion goes on or ends, and begins elsewhere; these groups of hosts communicate at the same time."""
        if self.narrow:
            self._leaving = Counter(leaf for group in groups for leaf in self._left_by(group))
        if not self.noise.congested:
            return
        self._congested = {
            leaf
            for leaf in range(self._leaves)
            if self._random.random() < (self.noise.lasting if leaf in self._congested else self.noise.congested)
        }

    def _left_by(self, group: Sequence[int]) -> set[int]:
        """The narrow leaves that a group leaves: once each, as the ring of an all-reduce does."""
        leaves = set(map(self.leaf_of, group))
        return leaves & self.narrow if len(leaves) > 1 else set()

    def ends(self, group: Sequence[int]) -> bool:
        """Whether a test of these hosts ends."""
        return self.hanging.isdisjoint(group) and self.dead.isdisjoint(group)

    def rate(self, group: Sequence[int], inside: Sequence[int] = ()) -> float:
        """The rate of these hosts together in this test, in bytes per second of bus bandwidth.

        Of one host it may be some of its ranks, by their local ranks.
        """
        rate = self.usual * self.level
        if not self.slow_inside.isdisjoint(group):
            is_slow = not inside or SLOW_LOCAL_RANK in inside
        else:
            over_link = any(link <= {*group} for link in self.links)
            is_slow = len(group) > 1 and (over_link or not self.slow.isdisjoint(group))
        if is_slow:
            rate *= 1 - self.slower
        if self._congested and len(group) > 1 and any(self.leaf_of(host) in self._congested for host in group):
            rate *= _CONGESTED_SHARE
        if self.narrow:
            carried = self.hosts_per_leaf * _NARROW_SHARE
            rate *= min((carried / max(carried, self._leaving[leaf]) for leaf in self._left_by(group)), default=1.0)
        if self._random.random() < self.noise.transients:
            rate *= _TRANSIENT_SHARE
        return rate * max(0.01, 1 + self.noise.sigma * self._random.gauss(0, 1))


_BYTES = 64 << 20
# What a pair of hosts needs, beside the calls: to meet, to open a group, to connect.
_ROUND_SECONDS = 3.0
_HANG_SECONDS = 10.0


def simulate(
    fleet: Fleet, *, ranks_per_host: int = 1, options: Options | None = None, run_id: str = "sim"
) -> Recording:
    """The recording of one run; the same for the same fleet, seed and run id."""
    ranks = fleet.hosts * ranks_per_host
    wanted = options or Options(stages=("fabric",), backend="nccl")
    header = Header(run_id=run_id, world_size=ranks, launcher="simulated", options=wanted, created="", version="")
    arrivals = dict(_arrivals(fleet, ranks_per_host))
    world = World(size=ranks, launcher="simulated", options=wanted, arrivals=arrivals)
    known, seconds = Recording(header=header, arrivals=arrivals), 0.0
    for check in (fab001.CHECK, gpus.CHECK):
        if reason := check.skip(Seen(world, check, known)):
            known = structs.replace(
                known, skips=(*known.skips, Skip(code=check.code, reason=reason.text, grounds=True))
            )
            continue
        while planned := check.plan(Seen(world, check, known)):
            known, seconds = _tried(fleet, known, planned, ranks_per_host, seconds)
    # No budget ends what takes no time, so the run had at least what it took.
    given = structs.replace(wanted, budget_seconds=max(wanted.budget_seconds, seconds))
    return structs.replace(known, header=structs.replace(header, options=given), end=End(seconds=seconds))


def _tried(
    fleet: Fleet, known: Recording, planned: Sequence[Trial], ranks_per_host: int, begin: float
) -> tuple[Recording, float]:
    """The run after these trials as well, and how long it has taken."""
    trials, outcomes = [*known.trials], [*known.outcomes]
    for trial in planned:
        numbered = structs.replace(trial, number=len(trials) + 1, begin_seconds=begin)
        trials.append(numbered)
        own = [*outcomes_of(fleet, numbered, ranks_per_host)]
        outcomes += own
        begin += max(outcome.seconds for outcome in own)
    return structs.replace(known, trials=tuple(trials), outcomes=tuple(outcomes)), begin


def host_name(host: int) -> str:
    """Such as "n0007"."""
    return f"n{host:04d}"


def _arrivals(fleet: Fleet, ranks_per_host: int) -> Iterator[tuple[int, Arrival]]:
    for host in range(fleet.hosts):
        name, address = host_name(host), f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"
        for local_rank in range(ranks_per_host):
            rank = host * ranks_per_host + local_rank
            place = Place(
                rank=rank,
                world_size=fleet.hosts * ranks_per_host,
                host=name,
                launcher="simulated",
                local_rank=local_rank,
                local_world_size=ranks_per_host,
                node_rank=host,
            )
            yield rank, Arrival(place=place, host_id=name, pid=1000 + rank, address=address, gpus=ranks_per_host)


def outcomes_of(fleet: Fleet, trial: Trial, ranks_per_host: int) -> Iterator[Outcome]:
    """The outcomes of every rank of a trial, in order."""
    fleet.next_round([sorted({rank // ranks_per_host for rank in group}) for group in trial.groups])
    for group in trial.groups:
        hosts = sorted({rank // ranks_per_host for rank in group})
        if not fleet.ends(hosts):
            for rank in group:
                is_dead = rank // ranks_per_host in fleet.dead
                yield Outcome(
                    trial=trial.number,
                    code=trial.code,
                    rank=rank,
                    status=Status.DIED if is_dead else Status.HUNG,
                    at="all_reduce",
                    error="exit code -11" if is_dead else "",
                    seconds=_HANG_SECONDS,
                )
            continue
        inside = tuple(rank % ranks_per_host for rank in group) if len(hosts) == 1 else ()
        seconds = _BYTES * factor("all_reduce", len(group)) / fleet.rate(hosts, inside)
        samples = Samples(min=seconds, median=1.005 * seconds, p95=1.02 * seconds, count=6)
        # Not the codec's encode, which spells numbers that JSON has not: these are finite, and many.
        data = Raw(json.encode(Data(len(group), _BYTES, samples)))
        for rank in group:
            yield Outcome(
                trial=trial.number, code=trial.code, rank=rank, status=Status.DONE, data=data, seconds=_ROUND_SECONDS
            )
