"""The search for a set of overrides (NCCL variables that are set or unset) with which a backend works.

The search is a generator: it yields the next step, and receives the result of that step. `replay` sends all known
results to it, so that the plan and the judgement run the same code.

First the unchanged environment is tried, then the environment without the user's NCCL variables, then each override
that an error names, alone. Then overrides accumulate until a set works. Each override of that set is removed if the
others suffice. A set that failed in one group of all ranks does not run again. The final set must work CONFIRMED times.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

# Runs that must work before a set is recommended: a set that fails every second time passes in one of eight cases.
CONFIRMED = 3


class Override(NamedTuple):
    """One override: its name, its variables (None: unset), and the feature that it turns off ("direct copies ...")."""

    name: str
    env: Mapping[str, str | None]
    feature: str = ""


Overrides = tuple[Override, ...]


class Grouping(Enum):
    """The ranks that form a process group in a step: all ranks together, or the ranks of each host."""

    ALL_RANKS = "all ranks"
    EACH_HOST = "each host"


class Step(NamedTuple):
    """One attempt: the grouping of the ranks, and the overrides."""

    grouping: Grouping
    overrides: Overrides = ()

    @property
    def key(self) -> tuple[str, str]:
        """The key under which the results of this step are recorded."""
        return self.grouping.value, self.set_name

    @property
    def set_name(self) -> str:
        """The names of the overrides, such as "P2P + SHM"; empty for the unchanged environment."""
        return " + ".join(override.name for override in self.overrides)

    @property
    def env(self) -> dict[str, str | None]:
        """The variables of all overrides. The value of a later override replaces that of an earlier one."""
        return {name: value for override in self.overrides for name, value in override.env.items()}


class Result(NamedTuple):
    """The result of a step.

    `failed_groups` are the groups of ranks that failed, `failure` is the worst status ("hung") or "wrong", `error` a
    rank's exception; each may be empty. `busbw` is the rate of the slowest group in bytes/s, None if a group failed.
    """

    step: Step
    failure: str = ""
    busbw: float | None = None
    failed_groups: tuple[tuple[int, ...], ...] = ()
    error: str = ""

    @property
    def works(self) -> bool:
        return not self.failed_groups


class SearchInput(NamedTuple):
    """The facts that are known before a search, and the overrides that the search may try.

    `failed_before`: the backend failed in COL001, in the unchanged environment. `hosts`: the ranks of each host.
    `user_variables`: overrides that unset the user's variables. `inside_hosts`, `between_hosts`: overrides for paths of
    this kind; `named_in_errors` are those that an error names. `alternatives`: overrides tried last, one at a time.
    """

    failed_before: bool
    hosts: tuple[tuple[int, ...], ...]
    user_variables: Overrides = ()
    inside_hosts: Overrides = ()
    between_hosts: Overrides = ()
    alternatives: Overrides = ()
    named_in_errors: Overrides = ()


class EndKind(Enum):
    WORKS = "works"  # the backend works, and worked in COL001
    TRANSIENT = "transient"  # the backend works, but failed in COL001
    FOUND = "found"  # the backend works with a set of overrides
    NOTHING = "nothing"  # no set works, or the set that worked failed in a later run


class SearchEnd(NamedTuple):
    """The end of a search: the set that worked at least once, if any, and its runs. `hosts_work`: each host alone works
    without overrides; False also if that was not tried."""

    kind: EndKind
    overrides: Overrides = ()
    runs: tuple[Result, ...] = ()
    hosts_work: bool = False


ResultsByStep = Mapping[tuple[str, str], Sequence[Result]]
Search = Generator[Step, Result, SearchEnd]
# Sets (names of their overrides) that failed with all ranks.
FailedSets = set[frozenset[str]]
WorkingSet = tuple[Overrides, Result]


def replay(facts: SearchInput, results: ResultsByStep) -> tuple[Step | SearchEnd, tuple[Result, ...]]:
    """Return the next step of the search, or its end, and the results that it used, in the order of their steps."""
    unused_results = {key: deque(tried) for key, tried in results.items()}
    used_results: list[Result] = []
    search = _search(facts)
    step = next(search)
    while results_of_step := unused_results.get(step.key):
        used_results.append(results_of_step.popleft()._replace(step=step))
        try:
            step = search.send(used_results[-1])
        except StopIteration as end:
            return end.value, tuple(used_results)
    return step, tuple(used_results)


def _search(facts: SearchInput) -> Search:
    first = yield Step(Grouping.ALL_RANKS)
    runs, is_confirmed = yield from _confirm((), first)
    if is_confirmed:
        return SearchEnd(EndKind.TRANSIENT if facts.failed_before else EndKind.WORKS, (), runs)
    failed_sets: FailedSets = set()
    working_set, hosts_work = yield from _accumulate(facts, failed_sets)
    if working_set is None:
        return SearchEnd(EndKind.NOTHING, hosts_work=hosts_work)
    overrides, last_run = yield from _minimise(working_set, failed_sets)
    runs, is_confirmed = yield from _confirm(overrides, last_run)
    return SearchEnd(EndKind.FOUND if is_confirmed else EndKind.NOTHING, overrides, runs, hosts_work=hosts_work)


def _try_set(overrides: Overrides, failed_sets: FailedSets) -> Generator[Step, Result, WorkingSet | None]:
    """Run a set with all ranks, unless it is in `failed_sets`. Return the set and its result if it works, else None."""
    names = frozenset(override.name for override in overrides)
    if names in failed_sets:
        return None
    result = yield Step(Grouping.ALL_RANKS, overrides)
    if result.works:
        return overrides, result
    failed_sets.add(names)
    return None


def _accumulate(facts: SearchInput, failed_sets: FailedSets) -> Generator[Step, Result, tuple[WorkingSet | None, bool]]:
    """Add overrides until a set works. Returns that set with its run (or None), and whether each host works alone."""
    hosts_work = False
    if len(facts.hosts) > 1 and max(map(len, facts.hosts)) > 1:
        hosts_work = (yield Step(Grouping.EACH_HOST)).works
    overrides = facts.user_variables
    named = [(*overrides, override) for override in facts.named_in_errors]
    for candidate in (overrides, *named) if overrides else named:
        if working_set := (yield from _try_set(candidate, failed_sets)):
            return working_set, hosts_work
    several_hosts = len(facts.hosts) > 1
    for override in () if hosts_work else facts.inside_hosts:
        overrides = (*overrides, override)
        # Several hosts are first tried alone, because all ranks together may also fail for another reason.
        if several_hosts and not (yield Step(Grouping.EACH_HOST, overrides)).works:
            continue
        if working_set := (yield from _try_set(overrides, failed_sets)):
            return working_set, hosts_work
        if several_hosts:
            break
    candidates = [(*overrides, *facts.between_hosts[: count + 1]) for count in range(len(facts.between_hosts))]
    for candidate in (*candidates, *((*overrides, *facts.between_hosts, other) for other in facts.alternatives)):
        if working_set := (yield from _try_set(candidate, failed_sets)):
            return working_set, hosts_work
    return None, hosts_work


def _minimise(working_set: WorkingSet, failed_sets: FailedSets) -> Generator[Step, Result, WorkingSet]:
    """Remove each override that the set does not need, and return the set with its last run. The empty set is not tried
    again, because it failed before."""
    for override in working_set[0]:
        rest = tuple(other for other in working_set[0] if other is not override)
        if rest and (smaller := (yield from _try_set(rest, failed_sets))):
            working_set = smaller
    return working_set


def _confirm(overrides: Overrides, last_run: Result) -> Generator[Step, Result, tuple[tuple[Result, ...], bool]]:
    """Run a set until it worked CONFIRMED times or failed. Returns the runs, and whether the last run worked."""
    runs = [last_run]
    while len(runs) < CONFIRMED and runs[-1].works:
        runs.append((yield Step(Grouping.ALL_RANKS, overrides)))
    return tuple(runs), runs[-1].works
