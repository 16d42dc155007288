"""The ranks of single hosts, rounds and what each group reached, put together from FAB002's trials."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.hosts.data import Data, answers_of
from ddpdiag.checks.fabric.search.pair_confirm_cover import Diagnosis, Reached, Results, Round, localise
from ddpdiag.checks.fabric.search.rules import Rules
from ddpdiag.checks.fabric.search.whole import follow


class InsideView:
    """Each host has a search of its own, and all go on at the same time. `wanted` are the hosts to begin with."""

    def __init__(self, seen: Seen[Data], rules: Rules, wanted: Sequence[tuple[int, ...]]) -> None:
        self._seen = seen
        self._rules = rules
        self._wanted = wanted

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host that is looked at: the first trial has pairs of all of them."""
        hosts = tuple(self._seen.world.hosts.values())
        if not self._seen.trials:
            return tuple(self._wanted)
        tried = {rank for group in self._seen.trials[0].groups for rank in group}
        return tuple(ranks for ranks in hosts if not tried.isdisjoint(ranks))

    @cached_property
    def states(self) -> tuple[Round | Diagnosis, ...]:
        """The next round of each host, or what came of it."""
        return tuple(self._state(ranks) for ranks in self.hosts)

    def _state(self, ranks: tuple[int, ...]) -> Round | Diagnosis:
        search = localise(ranks, rules=self._rules, seed=ranks[0])
        return follow(search, self._answers[ranks[0]], self.possible)

    @cached_property
    def _answers(self) -> Mapping[int, Sequence[Results]]:
        """What the pairs of each host (its first rank) reached, in those trials in which any of it took part."""
        host_of = {rank: ranks[0] for ranks in self.hosts for rank in ranks}
        answers: dict[int, list[Results]] = {ranks[0]: [] for ranks in self.hosts}
        for results in answers_of(self._seen):
            own: dict[int, dict[tuple[int, ...], Reached]] = {}
            for group, reached in results.items():
                own.setdefault(host_of[group[0]], {})[group] = reached
            for host, told in own.items():
                answers[host].append(told)
        return answers

    def possible(self, step: Round) -> tuple[tuple[int, ...], ...]:
        """Those pairs of a round of which nobody is lost."""
        return tuple(group for group in step.groups if self._living.issuperset(group))

    @cached_property
    def _living(self) -> frozenset[int]:
        return frozenset(self._seen.world.living)
