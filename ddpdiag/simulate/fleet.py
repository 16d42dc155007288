"""A fleet of hosts with faults and noise: what a group of them would reach. Seeded, so that a run can be repeated.

A group is as slow as its slowest member or way, times noise. Transients halve a test at random; a congested leaf
halves, for as long as it lasts, what goes there.
"""

from collections.abc import Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from ddpdiag.errors import UsageError

# A leaf switch has so many hosts, unless said otherwise.
HOSTS_PER_LEAF = 32
# On a host that is slow inside it is the GPU of this local rank.
SLOW_LOCAL_RANK = 1
_TRANSIENT_SHARE = 0.5
_CONGESTED_SHARE = 0.5


class Fault(Enum):
    """What may be wrong."""

    NONE = "none"
    SLOW_HOST = "slow-host"  # with every partner; its ranks among themselves are as quick as others
    SLOW_INSIDE = "slow-inside"  # one of its GPUs: alone and with every partner
    DEAD_HOST = "dead-host"  # its processes end in the first test
    HANG = "hang"  # no test with it ends
    SLOW_LINK = "slow-link"  # one pair of hosts
    LEAF = "leaf"  # half of the hosts of one leaf are slow
    TRANSIENT = "transient"  # one test in twenty is slow, whoever takes part
    SYSTEMIC = "systemic"  # all hosts are far below what is expected


class Faults(NamedTuple):
    """How many of which fault, and how much slower slow ones are, as a share."""

    kinds: tuple[tuple[Fault, int], ...] = ()
    slower: float = 0.25


class Noise(NamedTuple):
    """Of the tests: a normal deviation, as a share of the rate; the share that is slow for no reason; and the share
    of leaves that are congested in a round, which goes on from round to round with the probability `lasting`."""

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
        self._random = Random(seed)
        self._transients = noise.transients
        self._congested: set[int] = set()
        for kind, count in faults.kinds:
            self._break(kind, count)

    @property
    def bad(self) -> frozenset[int]:
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
                if count > self._leaves:
                    raise UsageError(f"{count} bad leaves were asked for, and {self.hosts} hosts have {self._leaves}")
                for leaf in self._random.sample(range(self._leaves), count):
                    self.slow.update(self._of_leaf(leaf)[::2])
            case Fault.TRANSIENT:
                self._transients = 0.05
            case Fault.SYSTEMIC:
                self.level = 0.2

    def _choose(self, count: int) -> list[int]:
        free = [host for host in range(self.hosts) if host not in self.bad]
        if count > len(free):
            raise UsageError(f"{count} bad hosts were asked for, and there are {len(free)} left of {self.hosts}")
        return self._random.sample(free, count)

    def leaf_of(self, host: int) -> int:
        """The number of a host's leaf."""
        return host // self.hosts_per_leaf

    @property
    def _leaves(self) -> int:
        return -(-self.hosts // self.hosts_per_leaf)

    def _of_leaf(self, leaf: int) -> range:
        return range(leaf * self.hosts_per_leaf, min(self.hosts, (leaf + 1) * self.hosts_per_leaf))

    def next_round(self) -> None:
        """Congestion goes on or ends, and begins elsewhere."""
        if not self.noise.congested:
            return
        self._congested = {
            leaf
            for leaf in range(self._leaves)
            if self._random.random() < (self.noise.lasting if leaf in self._congested else self.noise.congested)
        }

    def ends(self, group: Sequence[int]) -> bool:
        """Does a test of these hosts end?"""
        return self.hanging.isdisjoint(group) and self.dead.isdisjoint(group)

    def _is_slow(self, group: Sequence[int], inside: Sequence[int]) -> bool:
        if not self.slow_inside.isdisjoint(group):
            return not inside or SLOW_LOCAL_RANK in inside
        return len(group) > 1 and (not self.slow.isdisjoint(group) or any(link <= {*group} for link in self.links))

    def rate(self, group: Sequence[int], inside: Sequence[int] = ()) -> float:
        """What these hosts reach together this time, in bytes per second of bus bandwidth.

        Of one host it may be some of its ranks, by their local ranks.
        """
        rate = self.usual * self.level
        if self._is_slow(group, inside):
            rate *= 1 - self.slower
        if self._congested and len(group) > 1 and any(self.leaf_of(host) in self._congested for host in group):
            rate *= _CONGESTED_SHARE
        if self._random.random() < self._transients:
            rate *= _TRANSIENT_SHARE
        return rate * max(0.01, 1 + self.noise.sigma * self._random.gauss(0, 1))
