"""A search for overrides with which a backend works: which set to try next, after what is known.

The procedure is written down as a generator: it yields each question and is sent the answer. `replay` plays the
known answers back to it, so that the plan and the judgement run the same lines.

First the environment as it is; then the same without the user's own overrides; then each override that an error names,
alone; then overrides accumulate until a set works. Each member of that set is left out once, and what works without it
goes. No set runs again that failed with all ranks. The rest runs until it has worked CONFIRMED times.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

# A set is recommended once it has worked so often: of what fails every second time, one in eight would pass.
CONFIRMED = 3


class Member(NamedTuple):
    """One override: its name, its variables (None: unset), and what it takes away ("direct copies between GPUs")."""

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
        """The key under which answers to this step are recorded."""
        return self.part.value, self.set

    @property
    def set(self) -> str:
        """The members by name: "P2P + SHM"; empty for the environment as it is."""
        return " + ".join(member.name for member in self.members)

    @property
    def env(self) -> dict[str, str | None]:
        """The members' variables together; of two values, the last one."""
        return {name: value for member in self.members for name, value in member.env.items()}


class Tried(NamedTuple):
    """The result of a step: `failed` are the groups that failed, and `how` the worst of them did ("hung", "wrong").

    `busbw` is the slowest group's, None where one failed. `error` is what a rank raised, if anything.
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
    """The known facts before a search: the places that it may try.

    `broken`: the backend failed before, in the environment as it is. `own` are the user's own overrides as members that
    take them away. `inside` and `across` are the overrides that may matter here; of these, `named` are those that an
    error names. The `alternatives` come last, one at a time. `hosts` are the ranks of each host.
    """

    broken: bool
    hosts: tuple[tuple[int, ...], ...]
    own: Members = ()
    inside: Members = ()
    across: Members = ()
    alternatives: Members = ()
    named: Members = ()


class Kind(Enum):
    """The kinds of an end of the search."""

    WORKS = "works"  # nothing is wrong
    TRANSIENT = "transient"  # it failed before, and does not any more
    FOUND = "found"  # a set with which it works
    NOTHING = "nothing"  # no set works, or one did and then failed


class Ended(NamedTuple):
    """The end of the search, its members, and the runs that prove it."""

    kind: Kind
    members: Members = ()
    runs: tuple[Tried, ...] = ()
    inside_works: bool = False


Answers = Mapping[tuple[str, str], Sequence[Tried]]
Search = Generator[Step, Tried, Ended]
# Sets, by their members' names, that all ranks tried together, and that do not do.
Failed = set[frozenset[str]]
Found = tuple[Members, Tried]


def replay(ground: Ground, answers: Answers) -> tuple[Step | Ended, tuple[Tried, ...]]:
    """The next step, or the end; and the answers in the order in which they were asked for."""
    left = {key: deque(tried) for key, tried in answers.items()}
    played: list[Tried] = []
    script = _search(ground)
    step = next(script)
    while known := left.get(step.key):
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


def _whole(members: Members, failed: Failed) -> Generator[Step, Tried, Found | None]:
    """The set with its run, where it works with all ranks; it does not run if it is known not to."""
    names = frozenset(member.name for member in members)
    if names in failed:
        return None
    tried = yield Step(Part.WHOLE, members)
    if tried.works:
        return members, tried
    failed.add(names)
    return None


def _accumulate(ground: Ground, failed: Failed) -> Generator[Step, Tried, tuple[Found | None, bool]]:
    """The first set that works, with its run, and whether all is well inside each host as it is."""
    inside_works = False
    if len(ground.hosts) > 1 and max(map(len, ground.hosts)) > 1:
        inside_works = (yield Step(Part.HOSTS)).works
    members = ground.own
    for candidate in (*((members,) if members else ()), *((*members, override) for override in ground.named)):
        if found := (yield from _whole(candidate, failed)):
            return found, inside_works
    several = len(ground.hosts) > 1
    for override in () if inside_works else ground.inside:
        members = (*members, override)
        # Of several hosts each is tried by itself first: all ranks together fail for other reasons, too.
        if several and not (yield Step(Part.HOSTS, members)).works:
            continue
        if found := (yield from _whole(members, failed)):
            return found, inside_works
        if several:
            break
    across = [(*members, *ground.across[: count + 1]) for count in range(len(ground.across))]
    for candidate in (*across, *((*members, *ground.across, other) for other in ground.alternatives)):
        if found := (yield from _whole(candidate, failed)):
            return found, inside_works
    return None, inside_works


def _minimise(found: Found, failed: Failed) -> Generator[Step, Tried, Found]:
    """Leave each member out once; the last run of the set that is left. The empty set is known not to do."""
    for member in found[0]:
        rest = tuple(other for other in found[0] if other is not member)
        if rest and (smaller := (yield from _whole(rest, failed))):
            found = smaller
    return found


def _confirm(members: Members, last: Tried) -> Generator[Step, Tried, tuple[tuple[Tried, ...], bool]]:
    """Run it until it worked CONFIRMED times in all, or failed."""
    runs = [last]
    while len(runs) < CONFIRMED and runs[-1].works:
        runs.append((yield Step(Part.WHOLE, members)))
    return tuple(runs), runs[-1].works
