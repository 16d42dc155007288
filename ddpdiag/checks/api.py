"""The parts of a check: a documented question, a plan, a measurement, a judgement.

`plan` and `judge` are pure functions of what was seen: no clock, no environment, no randomness. `measure` alone touches
the world, inside a worker that may die.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, cast

from msgspec import Raw, Struct

from ddpdiag.checks.findings import COMMON, FindingSpec, Section
from ddpdiag.checks.known_errors import KnownError
from ddpdiag.checks.registry import by_code
from ddpdiag.checks.world import World, crowded_seconds
from ddpdiag.codec import decode
from ddpdiag.model import (
    Finding,
    Kind,
    Matrix,
    Options,
    Outcome,
    Place,
    Recording,
    Scalar,
    Severity,
    Skip,
    Status,
    Trial,
)
from ddpdiag.model.trial import NOTHING, Context

D = TypeVar("D")
E = TypeVar("E")
T = TypeVar("T")


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
    """The ranks that take part: each alone, one of each host alone, all or none, or all that are left."""

    RANK = "rank"
    HOST = "host"
    WORLD = "world"
    LIVING = "living"


class SkipKind(Enum):
    """The meaning of a skipped check for the verdict."""

    INAPPLICABLE = "it does not apply here (no GPU, one host); a failure if the check or its stage was requested"
    OPTIONAL = "it does not apply here; a failure only if the check's own code was requested"
    UNNEEDED = "other checks leave nothing to do; never a failure"
    BLOCKED = "it should run, and what it needs failed in other checks"


class SkipReason(NamedTuple):
    """Why a check is not run."""

    text: str
    kind: SkipKind

    def skip(self, check: "Check[Any]", options: Options) -> Skip:
        """The line of the recording."""
        match self.kind:
            case SkipKind.INAPPLICABLE:
                is_selected = bool(options.select) and check.code.startswith(options.select)
                grounds = check.stage.value not in options.stages and not is_selected
            case SkipKind.OPTIONAL:
                grounds = check.code not in options.select
            case SkipKind.UNNEEDED | SkipKind.BLOCKED:
                grounds = self.kind is SkipKind.UNNEEDED
        return Skip(code=check.code, reason=self.text, grounds=grounds)


def inapplicable(text: str | None) -> SkipReason | None:
    """The check does not apply here, for the reason `text`; None without a reason."""
    return SkipReason(text, SkipKind.INAPPLICABLE) if text is not None else None


def optional(text: str | None) -> SkipReason | None:
    """As `inapplicable`; a request of the check's stage is no request of the check."""
    return SkipReason(text, SkipKind.OPTIONAL) if text is not None else None


def unneeded(text: str | None) -> SkipReason | None:
    """Other checks leave nothing to do, for the reason `text`; None without a reason."""
    return SkipReason(text, SkipKind.UNNEEDED) if text is not None else None


def blocked(text: str | None) -> SkipReason | None:
    """The check cannot run after what others found, for the reason `text`; None without a reason."""
    return SkipReason(text, SkipKind.BLOCKED) if text is not None else None


class Nothing(Struct, frozen=True):
    """The data of a check that judges what others saw."""


class Row(NamedTuple, Generic[D]):
    """One rank's answer in one trial."""

    place: Place
    data: D
    trial: Trial


class Concern(NamedTuple):
    """A finding that belongs to a stage, or to that of another check (its code).

    `affected` counts by status the outcomes of ranks that failed only because of the blamed ones.
    """

    where: Stage | str
    finding: Finding
    affected: Mapping[str, int] = {}


class Contribution(Struct, frozen=True, kw_only=True):
    """All that a check adds to the report beside its findings.

    `columns` are figures of the ranks, `figures` those of the run (units are in the names), `matrices` are figures of
    pairs, and `inventory` says by rank what a host has (INVENTORY).
    `section` is a part of the report, of a run that was made for this check. `concerns` are findings that belong to
    other stages. `excuse` says why an error, of this check or another one, does not concern the job. `workarounds` are
    variables that the job needs.
    """

    columns: Mapping[int, Mapping[str, Scalar]] = {}
    figures: Mapping[str, Scalar] = {}
    matrices: tuple[Matrix, ...] = ()
    inventory: Mapping[int, Mapping[str, str]] = {}
    section: Section | None = None
    concerns: tuple[Concern, ...] = ()
    excuse: Callable[[Finding], str | None] | None = None
    workarounds: Mapping[str, str | None] = {}


@dataclass(frozen=True, eq=False)
class Seen(Generic[D]):
    """The run so far: the world, this check's trials and outcomes, and (through `of`) the other checks'.

    Two are for plans only: `left_seconds` is what the budget leaves for trials; with `is_last` all other checks have
    run. `kept` are the findings of checks that were judged before, `sections` the parts of the report of these.
    """

    world: World
    check: "Check[D]"
    recording: Recording
    left_seconds: float = math.inf
    is_last: bool = False
    kept: dict[str, tuple[Finding, ...]] = field(default_factory=dict, repr=False)
    sections: tuple[Section, ...] = ()

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
        return self.world.options

    def of(self, other: "Check[E]") -> "Seen[E]":
        """The same run as another check sees it."""
        return Seen(self.world, other, self.recording, kept=self.kept)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of this check, judged once."""
        code = self.check.code
        if code not in self.kept:
            self.kept[code] = tuple(self.check.judge(self))
        return self.kept[code]

    def findings_of(self, code: str) -> tuple[Finding, ...]:
        """The findings of another check, which runs before this one."""
        return self.of(by_code(code)).findings

    def succeeded(self, trial: Trial) -> bool:
        """Whether this trial was done on every rank that took part."""
        return {o.status for o in self.outcomes if o.trial == trial.number} == {Status.DONE}

    @property
    def failure_text(self) -> str | None:
        """A clause if a trial over the job's backend, or a requested one, failed; else None."""
        if all(self.succeeded(trial) for trial in self.trials if not self.uses_other_backend(trial)):
            return None
        return f"{self.check.code} ({self.check.name}) did not go well"

    def uses_other_backend(self, trial: Trial) -> bool:
        """Whether the trial uses a backend that is neither the job's nor requested."""
        backend = trial.params.get("backend", self.world.backend)
        named = self.options.bench.backend if self.options.bench is not None else ()
        return backend != self.world.backend and backend not in named

    def is_harmless(self, trial: Trial) -> bool:
        """Whether a failure of this trial does not concern the job, because its backend is another one, which works."""
        return self.uses_other_backend(trial) and self.job_backend_works

    @cached_property
    def job_backend_works(self) -> bool:
        """Whether the job's backend was tried in any check, and all these trials succeeded."""
        numbers = {
            t.number for t in self.recording.trials if t.params.get("backend") == self.world.backend and not t.may_fail
        }
        return {o.status for o in self.recording.outcomes if o.trial in numbers} == {Status.DONE}

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
        hosts: Sequence[str] | None = None,
        gpus: Sequence[str] = (),
        links: Sequence[str] = (),
        evidence: Mapping[str, Scalar | list[Scalar]] | None = None,
        fix: str = "",
        env: Mapping[str, str | None] | None = None,
        of_the_run: bool = False,
        known: KnownError | None = None,
    ) -> Finding:
        """A finding of this check, `CODE.word`, as declared; `hosts` are those of the ranks unless given.

        A host that was tested alone (`ddpdiag host`) has no ranks.
        """
        finding = Finding(
            code=f"{self.check.code}.{word}",
            severity=self.check.severity_of(word) if severity is None else severity,
            title=title,
            message=message,
            ranks=() if self.options.alone else tuple(ranks),
            hosts=tuple(hosts) if hosts is not None else self.world.hosts_of(ranks),
            gpus=tuple(gpus),
            links=tuple(links),
            evidence=dict(evidence or {}),
            fix=fix,
            env=dict(env or {}),
            of_the_run=of_the_run,
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
        case Scope.HOST:
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
    fresh: bool = False,
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
    # Through torch, but for gloo, or through NVML.
    starts_gpus = backend != "gloo" if check.kind is Kind.TORCH else check.stage in (Stage.GPU, Stage.P2P)
    largest = max(map(len, chosen), default=1)
    grown = check.deadline + (PER_RANK_SECONDS * largest if largest > 1 else 0.0)
    return Trial(
        code=check.code,
        groups=chosen,
        kind=check.kind,
        deadline_seconds=seen.number("deadline_seconds", grown + crowded_seconds(seen.world.ranks_per_core)),
        params=dict(params or {}),
        env=dict(env or {}),
        fresh=fresh,
        may_fail=may_fail,
        late_after=late_after,
        first_use_seconds=FIRST_USE_SECONDS if starts_gpus else 0.0,
    )


@dataclass(frozen=True)
class Check(Generic[D]):
    """One documented question, which is a module: `CHECK: Check[Data] = Check(__name__, "HST008", "name", ...)`.

    Everything else is found in that module by name. A module has its docstring (the manual page), FINDINGS (all that it
    can find, by the word in their codes) and judge(seen); the others are optional:

    - SETTINGS: the names that `--set` takes, with their defaults.
    - Data, measure(ctx): the data of one rank. A check without `measure` judges what others saw.
    - plan(seen): the next trials; one trial of all in scope if there is no such function.
    - skip(seen): the reason not to run the check, or None.
    - report(seen): a Contribution.
    - last_seconds(seen): a check with it runs at the end (`seen.is_last`), after all others, for this long; it runs in
      its stage, too, if it has a plan there.
    """

    module: str
    code: str
    name: str
    stage: Stage
    scope: Scope
    kind: Kind = Kind.PLAIN
    _: KW_ONLY
    deadline: float = 5.0

    def _by_name(self, name: str, default: T) -> T:
        value: T = getattr(sys.modules[self.module], name, default)
        return value

    @cached_property
    def manual(self) -> str:
        return self._by_name("__doc__", "")

    @cached_property
    def findings(self) -> Mapping[str, FindingSpec]:
        return self._by_name("FINDINGS", {})

    @cached_property
    def settings(self) -> Mapping[str, float]:
        return self._by_name("SETTINGS", {})

    @cached_property
    def data(self) -> type[D]:
        return self._by_name("Data", cast("type[D]", Nothing))

    @cached_property
    def measure(self) -> Callable[[Context], D] | None:
        return self._by_name("measure", None)

    @cached_property
    def plan(self) -> Callable[[Seen[D]], Sequence[Trial]]:
        return self._by_name("plan", once)

    @cached_property
    def judge(self) -> Callable[[Seen[D]], Iterator[Finding]]:
        judge: Callable[[Seen[D]], Iterator[Finding]] = sys.modules[self.module].judge
        return judge

    @cached_property
    def skip(self) -> Callable[[Seen[D]], SkipReason | None]:
        return self._by_name("skip", lambda _: None)

    @cached_property
    def report(self) -> Callable[[Seen[D]], Contribution]:
        return self._by_name("report", lambda _: Contribution())

    @cached_property
    def last_seconds(self) -> Callable[[Seen[D]], float] | None:
        return self._by_name("last_seconds", None)

    @property
    def thresholds(self) -> Mapping[str, float]:
        """All that `--set` can change, with its defaults: the check's own, and the deadline where it runs trials."""
        return {**self.settings, "deadline_seconds": self.deadline} if self.measure is not None else self.settings

    def explained(self, word: str) -> FindingSpec:
        """The declaration of a finding of this check; KeyError if there is none."""
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
