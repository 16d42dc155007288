"""What a check is made of: a documented question, a plan, a measurement, a judgement.

`plan` and `judge` are pure functions of what was seen: no clock, no environment, no randomness. `measure` alone touches
the world, inside a worker that may die.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from msgspec import Raw, Struct

from ddpdiag.checks.findings import COMMON, FindingSpec, Section, Workarounds
from ddpdiag.checks.known_errors import KnownError
from ddpdiag.checks.registry import by_code
from ddpdiag.checks.world import World, crowded_seconds
from ddpdiag.codec import decode
from ddpdiag.model import Finding, Kind, Matrix, Options, Outcome, Place, Recording, Scalar, Severity, Status, Trial
from ddpdiag.model.report import Setting
from ddpdiag.model.trial import NOTHING, Context

D = TypeVar("D")
E = TypeVar("E")


class Stage(Enum):
    """The stages, in the order in which they run."""

    LAUNCH = "launch"
    HOST = "host"
    GPU = "gpu"
    RENDEZVOUS = "rendezvous"
    COLLECTIVE = "collective"
    P2P = "p2p"
    FABRIC = "fabric"
    TRAINING = "training"
    RUN = "run"  # not run by itself: what happened to our own run


class Scope(Enum):
    """Who takes part: every rank alone, one rank of each host alone, all ranks together and none may be missing, or
    those that are left, together."""

    RANK = "rank"
    NODE = "node"
    WORLD = "world"
    LIVING = "living"


class Nothing(Struct, frozen=True):
    """The data of a check that judges what others saw."""


class Row(NamedTuple, Generic[D]):
    """One rank's answer in one trial."""

    place: Place
    data: D
    trial: Trial


class Concern(NamedTuple):
    """A finding that belongs to a stage, or to that of another check (its code), and a note for the stage's line.

    `affected` counts by status the outcomes of ranks that failed only because of the blamed ones.
    """

    where: Stage | str
    finding: Finding
    note: str = ""
    affected: Mapping[str, int] = {}


@dataclass(frozen=True, eq=False)
class Seen(Generic[D]):
    """What is known so far: the world, this check's trials and outcomes, and (through `of`) the other checks'.

    Two are for plans only: `left_seconds` is what the budget leaves for trials; with `is_last` all other checks have
    run. `kept` are the findings of checks that were judged before.
    """

    world: World
    check: "Check[D]"
    recording: Recording
    left_seconds: float = math.inf
    is_last: bool = False
    kept: dict[str, tuple[Finding, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """This check's trials so far, in order."""
        return tuple(trial for trial in self.recording.trials if trial.code == self.check.code)

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """This check's outcomes so far, by trial and rank."""
        return tuple(outcome for outcome in self.recording.outcomes if outcome.code == self.check.code)

    @cached_property
    def rows(self) -> tuple[Row[D], ...]:
        """Answers of the ranks on which a trial was done."""
        return self._rows((o, o.data) for o in self.outcomes if o.status is Status.DONE)

    @cached_property
    def rows_so_far(self) -> tuple[Row[D], ...]:
        """As `rows`, and what ranks had handed over whose trial was cut short."""
        answers = ((o, o.data if o.status is Status.DONE else o.so_far) for o in self.outcomes)
        return self._rows((o, data) for o, data in answers if bytes(data) != bytes(NOTHING))

    def _rows(self, answers: Iterable[tuple[Outcome, Raw]]) -> tuple[Row[D], ...]:
        trials, places = {trial.number: trial for trial in self.trials}, self.world.places
        return tuple(
            Row(places[o.rank], decode(data, self.check.data), trials[o.trial])
            for o, data in answers
            if o.rank in places and o.trial in trials
        )

    @cached_property
    def by_rank(self) -> dict[int, D]:
        """Each rank's last answer."""
        return {row.place.rank: row.data for row in self.rows}

    @property
    def options(self) -> Options:
        """What the user asked for."""
        return self.world.options

    def of(self, other: "Check[E]") -> "Seen[E]":
        """The same run as another check sees it."""
        return Seen(self.world, other, self.recording, kept=self.kept)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What this check finds in the run: judged once, for whoever asks."""
        code = self.check.code
        if code not in self.kept:
            self.kept[code] = tuple(self.check.judge(self))
        return self.kept[code]

    def findings_of(self, code: str) -> tuple[Finding, ...]:
        """What another check, which runs before this one, finds."""
        return self.of(by_code(code)).findings

    def succeeded(self, trial: Trial) -> bool:
        """Was this trial done on every rank that took part?"""
        return {o.status for o in self.outcomes if o.trial == trial.number} == {Status.DONE}

    @property
    def hindrance(self) -> str | None:
        """Why what builds on this check cannot run, or None. What other backends than the job's did is no reason."""
        if all(self.succeeded(trial) for trial in self.trials if not self.is_beside(trial)):
            return None
        return f"{self.check.code} ({self.check.name}) did not go well"

    def is_beside(self, trial: Trial) -> bool:
        """Was this trial run over another backend than the one that the job takes, and that nobody asked for?"""
        backend = trial.params.get("backend", self.world.backend)
        named = self.options.bench.backends if self.options.bench is not None else ()
        return backend != self.world.backend and backend not in named

    def is_excused(self, trial: Trial) -> bool:
        """Does a failure of this trial not concern the job? It went another way, and the job's own one works."""
        return self.is_beside(trial) and self.own_backend_works

    @cached_property
    def own_backend_works(self) -> bool:
        """Was there a trial of any check over the job's own backend, and did all of them go well?"""
        own = {
            t.number for t in self.recording.trials if t.params.get("backend") == self.world.backend and not t.may_fail
        }
        return {o.status for o in self.recording.outcomes if o.trial in own} == {Status.DONE}

    def number(self, name: str, default: float | None = None) -> float:
        """The threshold `name` of this check: `--set CODE.name=value`, or `default`, or the check's own."""
        usual = self.check.thresholds[name] if default is None else default
        return float(self.options.settings.get(f"{self.check.code}.{name}", usual))

    def finding(
        self,
        word: str,
        title: str,
        message: str,
        *,
        severity: Severity | None = None,
        ranks: Sequence[int] = (),
        nodes: Sequence[str] | None = None,
        gpus: Sequence[str] = (),
        links: Sequence[str] = (),
        evidence: Mapping[str, Scalar | list[Scalar]] | None = None,
        fix: str = "",
        env: Mapping[str, str | None] | None = None,
        of_the_run: bool = False,
        guess: str = "",
        known: KnownError | None = None,
    ) -> Finding:
        """A finding of this check, `CODE.word`, as declared; `nodes` are those of the ranks unless given.

        A host that was tested alone (`ddpdiag host`) has no ranks.
        """
        finding = Finding(
            code=f"{self.check.code}.{word}",
            severity=self.check.severity_of(word) if severity is None else severity,
            title=title,
            message=message,
            ranks=() if self.options.alone else tuple(ranks),
            nodes=tuple(nodes) if nodes is not None else self.world.nodes_of(ranks),
            gpus=tuple(gpus),
            links=tuple(links),
            evidence=dict(evidence or {}),
            fix=fix,
            env=dict(env or {}),
            of_the_run=of_the_run,
            guess=guess,
        )
        return finding if known is None else known.explain(finding)


def scope_groups(scope: Scope, world: World) -> tuple[tuple[int, ...], ...]:
    """The groups in which the living ranks take part in a trial of that scope."""
    living = world.living
    match scope:
        case Scope.WORLD | Scope.LIVING:
            return (living,) if living else ()
        case Scope.RANK:
            return tuple((rank,) for rank in living)
        case Scope.NODE:
            alive = set(living)
            leaders = (next((r for r in ranks if r in alive), None) for ranks in world.hosts.values())
            return tuple((rank,) for rank in leaders if rank is not None)


def once(seen: Seen[D]) -> Sequence[Trial]:
    """The plan of most checks: one trial, everybody in scope; none of a check that only judges what others measured."""
    return () if seen.trials or seen.check.measure is None else (new_trial(seen),)


# gloo connects every rank with every other: 128 ranks on 2 cores took 17 s (measured, torch 2.13), 0.13 s each.
PER_RANK_SECONDS = 0.15
# NCCL's first communicator took 55 s on a healthy machine, 52 of them to load kernels (NCCL issue 1646). Without
# persistence mode the driver takes 25 to 35 s to start eight GPUs (Azure/AgentBaker pull request 2829).
FIRST_USE_SECONDS = 60.0


def new_trial(
    seen: Seen[D],
    *,
    groups: tuple[tuple[int, ...], ...] | None = None,
    params: Mapping[str, str | int | float | bool] | None = None,
    env: Mapping[str, str | None] | None = None,
    fresh: bool | None = None,
    may_fail: bool = False,
    late_after: float | None = None,
) -> Trial:
    """A trial of this check, without its number.

    The deadline grows with the largest group, and where many ranks share a core, unless `--set CODE.deadline_seconds`
    gives it.
    """
    check = seen.check
    backend = dict(params or {}).get("backend", seen.world.backend)
    chosen = scope_groups(check.scope, seen.world) if groups is None else groups
    largest = max(map(len, chosen), default=1)
    grown = check.deadline + (PER_RANK_SECONDS * largest if largest > 1 else 0.0)
    return Trial(
        code=check.code,
        groups=chosen,
        kind=check.kind,
        deadline_seconds=seen.number("deadline_seconds", grown + crowded_seconds(seen.world.ranks_per_core)),
        attempt=len(seen.trials),
        params=dict(params or {}),
        env=dict(env or {}),
        fresh=check.fresh if fresh is None else fresh,
        may_fail=may_fail,
        late_after=late_after,
        first_use_seconds=FIRST_USE_SECONDS if _starts_gpus(check, backend) else 0.0,
    )


def _starts_gpus(check: "Check[D]", backend: object) -> bool:
    """Whether a trial may be the first user of the GPUs: through torch, but for gloo, or through NVML."""
    return backend != "gloo" if check.kind is Kind.TORCH else check.stage in (Stage.GPU, Stage.P2P)


@dataclass(frozen=True)
class Check(Generic[D]):
    """One documented question.

    `ground` says why the check makes no sense here (no GPU, one rank), or None; that is no excuse for a check that was
    asked for, by its code or its stage. An `optional` one is asked for by its code only. One that runs `by_name` is
    left out unless its whole code was asked for. `blocked` says why it cannot run after what others saw. It `follows`
    checks that it looks into where they did not go well, and may be left out where they did.
    `findings` are what it can find, by the word in their codes.
    `columns` adds figures to the ranks' rows of the report, `figures` to its measurements; units are in the names;
    `matrices` are what it knows of pairs; `section` is its own part of the report, if the run was made for it;
    `runs_with` are versions and settings of the ranks; `inventory` is what a host has (INVENTORY, in words), by one or
    all of its ranks. `concerns` says to which other stages its findings belong, `excuse` why an error, of this check or
    of another one, does not concern the job; `workarounds` are variables that the job needs.
    `moot` says why, after what others saw, there is nothing to try (it is asked where the first plan is empty). A check
    with `last` looks at what the others may have changed, after all of them: it tells the seconds that this takes,
    which are kept for it. It runs in its stage, too, if it has a plan there.
    A check without `measure` judges what others saw. `settings` are the names that `--set` takes, with their defaults.
    """

    code: str
    name: str
    stage: Stage
    scope: Scope
    _: KW_ONLY
    manual: str
    judge: Callable[[Seen[D]], Iterator[Finding]]
    data: type[D]
    measure: Callable[[Context], D] | None = None
    plan: Callable[[Seen[D]], Sequence[Trial]] = once
    ground: Callable[[World], str | None] = lambda world: None
    columns: Callable[[Seen[D]], Mapping[int, Mapping[str, Scalar]]] | None = None
    figures: Callable[[Seen[D]], Mapping[str, Scalar]] | None = None
    matrices: Callable[[Seen[D]], Iterable[Matrix]] | None = None
    section: Callable[[Seen[D]], Section | None] | None = None
    moot: Callable[[Seen[D]], str | None] | None = None
    runs_with: Callable[[Seen[D]], Iterator[Setting]] | None = None
    inventory: Callable[[Seen[D]], Mapping[int, Mapping[str, str]]] | None = None
    concerns: Callable[[Seen[D], Sequence[Finding]], Iterator[Concern]] | None = None
    last: Callable[[Seen[D]], float] | None = None
    excuse: Callable[[Seen[D], Finding], str | None] | None = None
    workarounds: Callable[[Seen[D]], Workarounds] | None = None
    blocked: Callable[[Seen[D]], str | None] | None = None
    follows: tuple[str, ...] = ()
    kind: Kind = Kind.PLAIN
    deadline: float = 5.0
    fresh: bool = False
    optional: bool = False
    by_name: bool = False
    findings: Mapping[str, FindingSpec] = field(default_factory=dict, hash=False)
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def thresholds(self) -> Mapping[str, float]:
        """All that `--set` can change, with its defaults: the check's own, and the deadline where it runs trials."""
        return {**self.settings, "deadline_seconds": self.deadline} if self.measure is not None else self.settings

    def explained(self, word: str) -> FindingSpec:
        """What is declared of a finding of this check; KeyError if nothing is."""
        return self.findings[word] if word in self.findings else COMMON[word]

    def severity_of(self, word: str) -> Severity:
        """The severity of a finding that does not state its own."""
        severity = self.explained(word).severity
        if severity is None:
            raise TypeError(f"the severity of {self.code}.{word} depends on what was seen")
        return severity

    @property
    def title(self) -> str:
        """First line of the manual page."""
        return self.manual.strip().splitlines()[0].rstrip(".")
