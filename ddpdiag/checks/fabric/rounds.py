"""The state of FAB001's search for slow or failing hosts and paths: the hosts, and the results of all rounds, derived
from the trials of the run."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.bandwidth import busbw
from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.search import SearchInput, SearchResult, replay, search_all
from ddpdiag.checks.fabric.search_data import UNHEARD, Phase, Result, Results, Round, Rules
from ddpdiag.codec import decode
from ddpdiag.model import Outcome, Status
from ddpdiag.stats import Samples

# The statuses of ranks that failed, the worst first.
_WORST_FIRST = (Status.UNHEARD, Status.DIED, Status.RAISED, Status.HUNG, Status.SKIPPED)


class Data(Struct, frozen=True, gc=False):
    """The number of ranks in a group, the bytes and seconds of its all-reduces, and this rank's wrong elements."""

    ranks: int
    bytes: int
    seconds: Samples
    wrong: int = 0


class Fleet(NamedTuple):
    """The names and ranks of the hosts, which are numbered from 0 in the order of their first ranks."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    def ranks_of(self, group: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks of these hosts (numbers), in rising order."""
        return tuple(sorted(chain.from_iterable(self.ranks[host] for host in group)))


@dataclass(frozen=True, eq=False)
class FabricState:
    """The state of FAB001's search in one run. Hosts are given by their numbers in `fleet`."""

    _seen: Seen[Data]
    _rules: Rules

    @cached_property
    def fleet(self) -> Fleet:
        """All hosts that joined. A host that is lost later stays in the fleet, so that numbers do not change."""
        hosts = self._seen.world.hosts
        return Fleet(tuple(name for name, _ in hosts), tuple(hosts.values()))

    @cached_property
    def absent_hosts(self) -> frozenset[int]:
        """The hosts that lost a rank before the search began. The first trial records them in its parameters."""
        if self._seen.trials:
            return frozenset(map(int, str(self._seen.trials[0].params.get("absent", "")).split()))
        living = frozenset(self._seen.world.living_ranks)
        return frozenset(host for host, ranks in enumerate(self.fleet.ranks) if not living.issuperset(ranks))

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The hosts that take part in the search."""
        return tuple(host for host in range(len(self.fleet.names)) if host not in self.absent_hosts)

    @cached_property
    def search_input(self) -> SearchInput:
        """The input of the search. Its seed derives from the run id, so that another run tests other pairs."""
        return SearchInput(
            units=self.units,
            testable_alone=tuple(unit for unit in self.units if len(self.fleet.ranks[unit]) > 1),
            domains=self._domains,
            rules=self._rules,
            seed=zlib.crc32(self._seen.recording.header.run_id.encode()),
        )

    @property
    def _domains(self) -> Mapping[int, str]:
        """The leaf switch of each host, from the user's file or else from Slurm. Names of the two are never mixed."""
        arrivals = self._seen.world.arrivals
        leaves = (
            next((leaf for rank in ranks if (leaf := arrivals[rank].leaf_switch)), "") for ranks in self.fleet.ranks
        )
        return self.user_domains or {unit: leaf for unit, leaf in enumerate(leaves) if leaf}

    @cached_property
    def user_domains(self) -> Mapping[int, str]:
        """The leaf switch of each host that the user's file of `--topology` names."""
        known = self._seen.world.leaf_by_host
        return {unit: known[name] for unit, name in enumerate(self.fleet.names) if name in known}

    @cached_property
    def results(self) -> tuple[Results, ...]:
        """The results of each trial, by group of hosts, in order, up to the first trial that the run cut short."""
        host_of = {ranks[0]: host for host, ranks in enumerate(self.fleet.ranks)}
        return tuple(
            {tuple([host_of[rank] for rank in ranks if rank in host_of]): tested for ranks, tested in results.items()}
            for results in results_of(self._seen)
        )

    @property
    def pair_rates(self) -> dict[tuple[int, int], float]:
        """The best rate of each pair of hosts in bytes/s, under both orders of the pair; 0 if no test succeeded."""
        rates: dict[tuple[int, int], float] = {}
        for results in self.results:
            for group, tested in results.items():
                if len(group) == 2:
                    one, other = group
                    best = max(rates.get((one, other), 0.0), tested.rate or 0.0)
                    rates[one, other] = rates[other, one] = best
        return rates

    @cached_property
    def state(self) -> Round | SearchResult:
        """The next round that has a group to test, or the result of the search."""
        return replay(search_all(self.search_input), self.results, self.runnable)

    def runnable(self, step: Round) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each group that lost no rank. The final proof has one group: all hosts that are left."""
        living = frozenset(self._seen.world.living_ranks)
        if step.phase is Phase.VERIFY:
            left = [host for host in step.groups[0] if living.issuperset(self.fleet.ranks[host])]
            return (self.fleet.ranks_of(left),) if len(left) > 1 else ()
        groups = (self.fleet.ranks_of(group) for group in step.groups)
        return tuple(ranks for ranks in groups if living.issuperset(ranks))


def results_of(seen: Seen[Data]) -> Iterator[Results]:
    """Yield the results of each trial, by group of ranks, in order, up to the first trial that the run cut short."""
    outcomes: dict[int, dict[int, Outcome]] = {trial.number: {} for trial in seen.trials}
    for outcome in seen.recording.outcomes:
        if outcome.trial in outcomes:
            outcomes[outcome.trial][outcome.rank] = outcome
    for trial in seen.trials:
        by_rank = outcomes[trial.number]
        failed = {rank: outcome for rank, outcome in by_rank.items() if outcome.status is not Status.DONE}
        cut = (Status.SKIPPED, Status.HUNG) if trial.is_shortened else (Status.SKIPPED,)
        if len(by_rank) != sum(map(len, trial.groups)) or any(outcome.status in cut for outcome in failed.values()):
            return
        results: dict[tuple[int, ...], Result] = {}
        for group in trial.groups:
            if failed.keys().isdisjoint(group):
                results[group] = _group_result(bytes(by_rank[group[0]].data))
                continue
            # The worst outcome of the group counts. A rank that rank 0 ended counts only if no other rank failed.
            bad = [failed[rank] for rank in group if rank in failed]
            worst = min([o for o in bad if not o.interrupted] or bad, key=lambda o: _WORST_FIRST.index(o.status))
            results[group] = Result(None, worst.status.value)
        yield results


# Each plan reads the results of all rounds. The results of all but the last round are in the cache.
@lru_cache(maxsize=1 << 17)
def _group_result(data: bytes) -> Result:
    """Return a group's result from its first rank's data: all ranks end together, and know whether values are wrong."""
    row = decode(data, Data)
    if row.wrong:
        return Result(None, "wrong")
    least = row.seconds.min
    if least <= 0:
        return Result(None, UNHEARD)
    return Result(busbw("all_reduce", row.bytes, least, row.ranks), "", max(0.0, row.seconds.median / least - 1))
