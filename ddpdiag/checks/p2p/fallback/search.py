"""The search for a set of overrides (NCCL variables) with which a backend works.

The search is a generator: it yields the next step, and is sent the result of that step. `replay` sends it all known
results, so that the plan and the judgement run the same code.

The environment is tried as it is; then without the user's overrides; then with each override that an error names,
alone. Then overrides accumulate until a set works. Each member of that set is left out once, and removed if the rest
works without it. A set that failed with all ranks does not run again. The final set must work CONFIRMED times.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

# Runs that must work before a set is recommended: one that fails every second time passes in one of eight cases.
CONFIRMED = 3


class Member(NamedTuple):
    """One override: its name, its variables (None: unset), and the feature that it turns off ("direct copies ...")."""

    name: str
    env: Mapping[str, str | None]
    what: str = ""


Members = tuple[Member, ...]


class Part(Enum):
    """The ranks that take part together: all ranks, or the ranks of each host."""

    WHOLE = "all ranks"
    HOSTS = "each host"


class Step(NamedTuple):
    """One attempt: the ranks that take part together, and the overrides."""

    part: Part
    members: Members = ()

    @property
    def key(self) -> tuple[str, str]:
        """The key under which the results of this step are recorded."""
        return self.part.value, self.set

    @property
    def set(self) -> str:
        """The names of the members, such as "P2P + SHM"; empty for the environment as it is."""
        return " + ".join(member.name for member in self.members)

    @property
    def env(self) -> dict[str, str | None]:
        """The variables of all members; the value of a later member replaces that of an earlier one."""
        return {name: value for member in self.members for name, value in member.env.items()}


class Tried(NamedTuple):
    """The result of a step. `failed` are the groups that failed, `how` is the worst way in which one did ("hung").

    `busbw` is the rate of the slowest group, None if a group failed. `error` is the text of a rank's exception, if any.
    """

    step: Step
    how: str = ""
    busbw: float | None = None
    failed: tuple[tuple[int, ...], ...] = ()
    error: str = ""

    @property
    def works(self) -> bool:
        """Whether no group failed."""
        return not self.failed


class Ground(NamedTuple):
    """The facts that are known before a search, and the overrides that it may try.

    `broken`: the backend failed before, in the environment as it is. `own`: members that unset the user's overrides.
    `inside` and `across`: overrides for paths inside a host and between hosts that may help; of these, `named` are
    those that an error names. `alternatives` are tried last, one at a time. `hosts`: the ranks of each host.
    """

    broken: bool
    hosts: tuple[tuple[int, ...], ...]
    own: Members = ()
    inside: Members = ()
    across: Members = ()
    alternatives: Members = ()
    named: Members = ()


class Kind(Enum):
    """The ways in which a search ends."""

    WORKS = "works"  # nothing is wrong
    TRANSIENT = "transient"  # the backend failed before, and works now
    FOUND = "found"  # a set with which the backend works
    NOTHING = "nothing"  # no set works, or one did and then failed


class Ended(NamedTuple):
    """The end of a search, the members of the last set, and its runs. `inside_works`: each host works alone."""

    kind: Kind
    members: Members = ()
    runs: tuple[Tried, ...] = ()
    inside_works: bool = False


Answers = Mapping[tuple[str, str], Sequence[Tried]]
Search = Generator[Step, Tried, Ended]
# Sets (names of their members) that failed with all ranks.
Failed = set[frozenset[str]]
Found = tuple[Members, Tried]


def replay(ground: Ground, answers: Answers) -> tuple[Step | Ended, tuple[Tried, ...]]:
    """The next step of the search, or its end; and the known results in the order of their steps."""
    unused = {key: deque(tried) for key, tried in answers.items()}
    played: list[Tried] = []
    script = _search(ground)
    step = next(script)
    while known := unused.get(step.key):
        played.append(known.popleft()._replace(step=step))
        try:
            step = script.send(played[-1])
        except StopIteration as end:
            return end.value, tuple(played)
    return step, tuple(played)


def _search(ground: Ground) -> Search:
    first = yield Step(Part.WHOLE)
    runs, steady = yield from _confirm((), first)
    if steady:
        return Ended(Kind.TRANSIENT if ground.broken else Kind.WORKS, (), runs)
    failed: Failed = set()
    found, inside_works = yield from _accumulate(ground, failed)
    if found is None:
        return Ended(Kind.NOTHING, inside_works=inside_works)
    members, last = yield from _minimise(found, failed)
    runs, steady = yield from _confirm(members, last)
    return Ended(Kind.FOUND if steady else Kind.NOTHING, members, runs, inside_works=inside_works)


def _try_set(members: Members, failed: Failed) -> Generator[Step, Tried, Found | None]:
    """Run a set with all ranks, unless it is in `failed`. Returns the set and its result if it works, else None."""
    names = frozenset(member.name for member in members)
    if names in failed:
        return None
    tried = yield Step(Part.WHOLE, members)
    if tried.works:
        return members, tried
    failed.add(names)
    return None


def _accumulate(ground: Ground, failed: Failed) -> Generator[Step, Tried, tuple[Found | None, bool]]:
    """Add overrides until a set works. Returns that set with its run (or None), and whether each host works alone."""
    inside_works = False
    if len(ground.hosts) > 1 and max(map(len, ground.hosts)) > 1:
        inside_works = (yield Step(Part.HOSTS)).works
    members = ground.own
    for candidate in (*((members,) if members else ()), *((*members, override) for override in ground.named)):
        if found := (yield from _try_set(candidate, failed)):
            return found, inside_works
    several = len(ground.hosts) > 1
    for override in () if inside_works else ground.inside:
        members = (*members, override)
        # Each of several hosts is tried alone first, because all ranks together may fail for other reasons, too.
        if several and not (yield Step(Part.HOSTS, members)).works:
            continue
        if found := (yield from _try_set(members, failed)):
            return found, inside_works
        if several:
            break
    across = [(*members, *ground.across[: count + 1]) for count in range(len(ground.across))]
    for candidate in (*across, *((*members, *ground.across, other) for other in ground.alternatives)):
        if found := (yield from _try_set(candidate, failed)):
            return found, inside_works
    return None, inside_works


def _minimise(found: Found, failed: Failed) -> Generator[Step, Tried, Found]:
    """Leave each member out once. Returns the smallest set that works, with its last run. The empty set fails."""
    for member in found[0]:
        rest = tuple(other for other in found[0] if other is not member)
        if rest and (smaller := (yield from _try_set(rest, failed))):
            found = smaller
    return found


def _confirm(members: Members, last: Tried) -> Generator[Step, Tried, tuple[tuple[Tried, ...], bool]]:
    """Run a set until it worked CONFIRMED times, or failed. Returns the runs, and whether the last one worked."""
    runs = [last]
    while len(runs) < CONFIRMED and runs[-1].works:
        runs.append((yield Step(Part.WHOLE, members)))
    return tuple(runs), runs[-1].works
