"""A model of a fleet with faults and noise. It computes the rates of groups of hosts, and the recording of a run.

Equal seeds give equal runs. A group has the rate of its slowest host or link, times noise. Transients halve the rate
of a test at random. A congested leaf switch halves the rates of all groups with a host on it, as long as the congestion
lasts. The uplinks of a narrow leaf carry half of what its hosts can send, so the tests themselves congest them. Nothing
is measured and nothing waits. `ddpdiag judge` reads the recording like that of a real run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from msgspec import Raw, json, structs

from ddpdiag.bandwidth import busbw_factor
from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric import gpus
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.fabric.rounds import Data
from ddpdiag.checks.world import World
from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, Outcome, Place, Recording, RunOptions, Skip, Status, Trial
from ddpdiag.model.recording import End, Header
from ddpdiag.stats import Samples

# The default number of hosts on a leaf switch.
HOSTS_PER_LEAF = 32
# The local rank of the slow GPU on a host with the fault SLOW_INSIDE.
SLOW_LOCAL_RANK = 1
_TRANSIENT_SHARE = 0.5
_CONGESTED_SHARE = 0.5
# The uplinks of a narrow leaf carry this share of the rate that all hosts of the leaf can send.
_NARROW_SHARE = 0.5


class Fault(Enum):
    """The kinds of faults of a fleet."""

    NONE = "none"
    SLOW_HOST = "slow-host"  # slow in tests with other hosts, but not in tests of this host alone
    SLOW_INSIDE = "slow-inside"  # one GPU of the host is slow in all tests, also of this host alone
    DEAD_HOST = "dead-host"  # its processes end in the first test
    HANG = "hang"  # tests with this host never end
    SLOW_LINK = "slow-link"  # tests with both hosts of one pair are slow
    UPLINK = "uplink"  # the uplinks of one leaf carry half of what its hosts can send; no host is at fault
    LEAF = "leaf"  # half of the hosts of one leaf are slow


class Faults(NamedTuple):
    """Each kind of fault with its count. `slowdown` is the share by which slow hosts, GPUs and links are slower."""

    counts: tuple[tuple[Fault, int], ...] = ()
    slowdown: float = 0.25


class Noise(NamedTuple):
    """The noise of tests.

    `sigma` is the standard deviation of a rate, as a share of the rate. `transients` is the share of tests that are
    slow at random. `congestion` is the share of leaves on which congestion begins in a round. With the probability
    `persistence` a congestion continues in the next round.
    """

    sigma: float = 0.02
    transients: float = 0.01
    congestion: float = 0.0
    persistence: float = 0.5


HEALTHY = Faults()
USUAL_NOISE = Noise()


class Fleet:
    """Hosts, numbered from 0, with faults. `hosts` is their number, `healthy_bytes_per_s` their rate without faults."""

    def __init__(
        self,
        hosts: int,
        faults: Faults = HEALTHY,
        noise: Noise = USUAL_NOISE,
        *,
        seed: int = 0,
        healthy_bytes_per_s: float = 100e9,
        hosts_per_leaf: int = HOSTS_PER_LEAF,
    ) -> None:
        self.hosts = hosts
        self.noise = noise
        self.healthy_bytes_per_s = healthy_bytes_per_s
        self.hosts_per_leaf = hosts_per_leaf
        self.slowdown = faults.slowdown
        self.rate_factor = 1.0
        self.slow_hosts: set[int] = set()
        self.hosts_with_slow_gpu: set[int] = set()
        self.hanging_hosts: set[int] = set()
        self.dead_hosts: set[int] = set()
        self.slow_links: set[frozenset[int]] = set()
        self.narrow_leaves: set[int] = set()
        self._random = Random(seed)
        self._congested: set[int] = set()
        self._loads: Counter[int] = Counter()  # for each narrow leaf, the groups that use its uplinks in this round
        for kind, count in faults.counts:
            self._add_fault(kind, count)

    @property
    def failing(self) -> frozenset[int]:
        """The hosts that a correct judgement would blame."""
        return frozenset(self.slow_hosts | self.hosts_with_slow_gpu | self.hanging_hosts | self.dead_hosts)

    def _add_fault(self, kind: Fault, count: int) -> None:
        hosts_by_fault = {
            Fault.SLOW_HOST: self.slow_hosts,
            Fault.SLOW_INSIDE: self.hosts_with_slow_gpu,
            Fault.HANG: self.hanging_hosts,
            Fault.DEAD_HOST: self.dead_hosts,
        }
        if kind in hosts_by_fault:
            hosts_by_fault[kind].update(self._choose_healthy_hosts(count))
            return
        match kind:
            case Fault.SLOW_LINK:
                if count > (pairs := self.hosts * (self.hosts - 1) // 2):
                    raise UsageError(f"{count} slow links were asked for, and {self.hosts} hosts have {pairs} pairs")
                while len(self.slow_links) < count:
                    self.slow_links.add(frozenset(self._random.sample(range(self.hosts), 2)))
            case Fault.LEAF:
                for leaf in self._choose_leaves(count):
                    first, size = leaf * self.hosts_per_leaf, self.hosts_per_leaf
                    self.slow_hosts.update(range(first, min(self.hosts, first + size), 2))
            case Fault.UPLINK:
                self.narrow_leaves.update(self._choose_leaves(count))

    def _choose_healthy_hosts(self, count: int) -> list[int]:
        free = [host for host in range(self.hosts) if host not in self.failing]
        if count > len(free):
            raise UsageError(f"{count} failing hosts were asked for, and {len(free)} of {self.hosts} hosts are left")
        return self._random.sample(free, count)

    def _choose_leaves(self, count: int) -> list[int]:
        if count > self._leaf_count:
            raise UsageError(f"{count} failing leaves were asked for, and {self.hosts} hosts have {self._leaf_count}")
        return self._random.sample(range(self._leaf_count), count)

    @property
    def _leaf_count(self) -> int:
        return -(-self.hosts // self.hosts_per_leaf)

    def leaf_of(self, host: int) -> int:
        """The number of the leaf switch of a host."""
        return host // self.hosts_per_leaf

    def next_round(self, groups: Sequence[Sequence[int]] = ()) -> None:
        """Begin a round in which these groups of hosts communicate, and choose the leaves that are congested."""
        if self.narrow_leaves:
            self._loads = Counter(leaf for group in groups for leaf in self._used_uplinks(group))
        if not self.noise.congestion:
            return
        self._congested = {
            leaf
            for leaf in range(self._leaf_count)
            if self._random.random() < (self.noise.persistence if leaf in self._congested else self.noise.congestion)
        }

    def _used_uplinks(self, group: Sequence[int]) -> set[int]:
        """The narrow leaves whose uplinks a group uses. The ring of an all-reduce uses each once."""
        leaves = set(map(self.leaf_of, group))
        return leaves & self.narrow_leaves if len(leaves) > 1 else set()

    def ends(self, group: Sequence[int]) -> bool:
        """Whether a test of these hosts ends: none of them hangs or is dead."""
        return self.hanging_hosts.isdisjoint(group) and self.dead_hosts.isdisjoint(group)

    def rate(self, group: Sequence[int], local_ranks: Sequence[int] = ()) -> float:
        """The bus bandwidth of one test of these hosts in this round, in bytes per second, with random noise.

        For a test within one host, `local_ranks` are the ranks that take part; empty means all.
        """
        rate = self.healthy_bytes_per_s * self.rate_factor
        if not self.hosts_with_slow_gpu.isdisjoint(group):
            is_slow = not local_ranks or SLOW_LOCAL_RANK in local_ranks
        else:
            uses_slow_link = any(link <= {*group} for link in self.slow_links)
            is_slow = len(group) > 1 and (uses_slow_link or not self.slow_hosts.isdisjoint(group))
        if is_slow:
            rate *= 1 - self.slowdown
        if self._congested and len(group) > 1 and any(self.leaf_of(host) in self._congested for host in group):
            rate *= _CONGESTED_SHARE
        if self.narrow_leaves:
            limit = self.hosts_per_leaf * _NARROW_SHARE
            rate *= min((limit / max(limit, self._loads[leaf]) for leaf in self._used_uplinks(group)), default=1.0)
        if self._random.random() < self.noise.transients:
            rate *= _TRANSIENT_SHARE
        return rate * max(0.01, 1 + self.noise.sigma * self._random.gauss(0, 1))


_SIZE_BYTES = 64 << 20
# The seconds in which the ranks of a test start, open a group and connect. The calls themselves add no time.
_ROUND_SECONDS = 3.0
_HANG_SECONDS = 10.0


def simulate(
    fleet: Fleet, *, ranks_per_host: int = 1, options: RunOptions | None = None, run_id: str = "sim"
) -> Recording:
    """Plan and simulate one run, and return its recording. Equal fleets, seeds and run ids give equal recordings."""
    ranks = fleet.hosts * ranks_per_host
    run_options = options or RunOptions(stages=("fabric",), backend="nccl")
    header = Header(run_id=run_id, world_size=ranks, launcher="simulated", options=run_options, created="", version="")
    arrivals = dict(_arrivals(fleet, ranks_per_host))
    world = World(size=ranks, launcher="simulated", options=run_options, arrivals=arrivals)
    recording, seconds = Recording(header=header, arrivals=arrivals), 0.0
    for check in (fab001.CHECK, gpus.CHECK):
        if reason := check.skip(Seen(world, check, recording)):
            recording = structs.replace(
                recording, skips=(*recording.skips, Skip(code=check.code, reason=reason.text, is_inapplicable=True))
            )
            continue
        while planned := check.plan(Seen(world, check, recording)):
            recording, seconds = _with_trials(fleet, recording, planned, ranks_per_host, seconds)
    # The simulation ignores the budget. The recording gets one that covers the simulated seconds.
    final_options = structs.replace(run_options, budget_seconds=max(run_options.budget_seconds, seconds))
    return structs.replace(recording, header=structs.replace(header, options=final_options), end=End(seconds=seconds))


def _with_trials(
    fleet: Fleet, recording: Recording, planned: Sequence[Trial], ranks_per_host: int, begin_seconds: float
) -> tuple[Recording, float]:
    """Simulate trials from the time `begin` on. Returns the recording with them, and the time at which they end."""
    trials, outcomes = [*recording.trials], [*recording.outcomes]
    for trial in planned:
        numbered = structs.replace(trial, number=len(trials) + 1, begin_seconds=begin_seconds)
        trials.append(numbered)
        new_outcomes = [*outcomes_of(fleet, numbered, ranks_per_host)]
        outcomes += new_outcomes
        begin_seconds += max(outcome.seconds for outcome in new_outcomes)
    return structs.replace(recording, trials=tuple(trials), outcomes=tuple(outcomes)), begin_seconds


def host_name(host: int) -> str:
    """The name of a host, such as "n0007"."""
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
    """Simulate a trial as a new round of the fleet, and yield the outcome of each of its ranks, in order."""
    fleet.next_round([sorted({rank // ranks_per_host for rank in group}) for group in trial.groups])
    for group in trial.groups:
        hosts = sorted({rank // ranks_per_host for rank in group})
        if not fleet.ends(hosts):
            for rank in group:
                is_dead = rank // ranks_per_host in fleet.dead_hosts
                yield Outcome(
                    trial=trial.number,
                    code=trial.code,
                    rank=rank,
                    status=Status.DIED if is_dead else Status.HUNG,
                    last_step="all_reduce",
                    error="exit code -11" if is_dead else "",
                    seconds=_HANG_SECONDS,
                )
            continue
        local_ranks = tuple(rank % ranks_per_host for rank in group) if len(hosts) == 1 else ()
        seconds = _SIZE_BYTES * busbw_factor("all_reduce", len(group)) / fleet.rate(hosts, local_ranks)
        samples = Samples(min=seconds, median=1.005 * seconds, p95=1.02 * seconds, count=6)
        # msgspec's encode is faster than the codec's, which is needed only for nan and infinity.
        data = Raw(json.encode(Data(len(group), _SIZE_BYTES, samples)))
        for rank in group:
            yield Outcome(
                trial=trial.number, code=trial.code, rank=rank, status=Status.DONE, data=data, seconds=_ROUND_SECONDS
            )
