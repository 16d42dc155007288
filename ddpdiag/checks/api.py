"""The parts of a check: its manual page, its plan, its measurement and its judgement.

`plan` and `judge` are pure functions of the recorded run: they read no clock, no environment and no random numbers.
Only `measure` reads the machine. It runs in a worker process, which may crash without ending the run.
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
    Outcome,
    Place,
    Recording,
    RunOptions,
    Scalar,
    Severity,
    Skip,
    Status,
    Trial,
)
from ddpdiag.model.trial import NO_DATA, Context

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
    RUN = "run"  # no trials: its checks judge the run itself


class Scope(Enum):
    """The ranks of a trial: each rank alone, one rank of each host alone, all ranks or none, or all that are left."""

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
    """The reason why a check is not run, and its meaning for the verdict."""

    text: str
    kind: SkipKind

    def skip(self, check: "Check[Any]", options: RunOptions) -> Skip:
        """The recording's line about the skipped check. The options decide whether the skip is a failure."""
        match self.kind:
            case SkipKind.INAPPLICABLE:
                is_selected = bool(options.select) and check.code.startswith(options.select)
                grounds = check.stage.value not in options.stages and not is_selected
            case SkipKind.OPTIONAL:
                grounds = check.code not in options.select
            case SkipKind.UNNEEDED | SkipKind.BLOCKED:
                grounds = self.kind is SkipKind.UNNEEDED
        return Skip(code=check.code, reason=self.text, is_inapplicable=grounds)


def inapplicable(text: str | None) -> SkipReason | None:
    """A reason of kind INAPPLICABLE, or None if `text` is None."""
    return SkipReason(text, SkipKind.INAPPLICABLE) if text is not None else None


def optional(text: str | None) -> SkipReason | None:
    """A reason of kind OPTIONAL, or None if `text` is None."""
    return SkipReason(text, SkipKind.OPTIONAL) if text is not None else None


def unneeded(text: str | None) -> SkipReason | None:
    """A reason of kind UNNEEDED, or None if `text` is None."""
    return SkipReason(text, SkipKind.UNNEEDED) if text is not None else None


def blocked(text: str | None) -> SkipReason | None:
    """A reason of kind BLOCKED, or None if `text` is None."""
    return SkipReason(text, SkipKind.BLOCKED) if text is not None else None


class Nothing(Struct, frozen=True):
    """The data of a check that measures nothing and judges the data of other checks."""


class Row(NamedTuple, Generic[D]):
    """The data that one rank measured in one trial."""

    place: Place
    data: D
    trial: Trial


class Concern(NamedTuple):
    """A finding that the report shows under another stage. `where` is that stage, or the code of a check in it.

    `affected` counts, by status, the outcomes of ranks that failed only because of the blamed ranks.
    """

    where: Stage | str
    finding: Finding
    affected: Mapping[str, int] = {}


class Contribution(Struct, frozen=True, kw_only=True):
    """Everything that a check adds to the report in addition to its findings.

    `columns` are figures by rank, `figures` are figures of the whole run (units are in the names), and `matrices` are
    figures of pairs. `inventory` names the parts of a host (keys: INVENTORY), by rank. `section` is the check's part of
    the report if the run was made for this check. `concerns` are findings that are shown under other stages.
    `excuse(error)` returns a sentence if that error, of any check, does not concern the job, else None. `workarounds`
    are environment variables that the job needs (None: unset).
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
    """The recorded run as one check sees it: its trials and outcomes. `of` returns the view of another check.

    `left_seconds`, which the budget leaves for trials, and `is_last`, if all other checks have run, are set only for
    planning. `kept` holds the findings of all checks judged before, by code; `sections` are their parts of the report.
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
        """The data of each outcome with status DONE."""
        return self._rows((o, o.data) for o in self.outcomes if o.status is Status.DONE)

    @cached_property
    def rows_so_far(self) -> tuple[Row[D], ...]:
        """Like `rows`, with the partial data of ranks whose trial was cut short."""
        answers = ((o, o.data if o.status is Status.DONE else o.partial_data) for o in self.outcomes)
        return self._rows((o, data) for o, data in answers if bytes(data) != bytes(NO_DATA))

    def _rows(self, answers: Iterable[tuple[Outcome, Raw]]) -> tuple[Row[D], ...]:
        trials, places = {trial.number: trial for trial in self.trials}, self.world.places
        return tuple(
            Row(places[o.rank], decode(data, self.check.data), trials[o.trial])
            for o, data in answers
            if o.rank in places and o.trial in trials
        )

    @cached_property
    def by_rank(self) -> dict[int, D]:
        """The data of each rank's last trial that was DONE."""
        return {row.place.rank: row.data for row in self.rows}

    @property
    def options(self) -> RunOptions:
        return self.world.options

    def of(self, other: "Check[E]") -> "Seen[E]":
        """The same run, as the check `other` sees it."""
        return Seen(self.world, other, self.recording, kept=self.kept)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of this check. The first use judges the check and stores them in `kept`."""
        code = self.check.code
        if code not in self.kept:
            self.kept[code] = tuple(self.check.judge(self))
        return self.kept[code]

    def findings_of(self, code: str) -> tuple[Finding, ...]:
        """The findings of another check, which must run before this one."""
        return self.of(by_code(code)).findings

    def succeeded(self, trial: Trial) -> bool:
        """Whether the trial was DONE on every rank that took part."""
        return {o.status for o in self.outcomes if o.trial == trial.number} == {Status.DONE}

    @property
    def failure_text(self) -> str | None:
        """A clause about a failed trial over the job's backend or a requested one; None if none failed."""
        if all(self.succeeded(trial) for trial in self.trials if not self.uses_other_backend(trial)):
            return None
        return f"{self.check.code} ({self.check.name}) did not go well"

    def uses_other_backend(self, trial: Trial) -> bool:
        """Whether the trial uses a backend that is neither the job's nor requested."""
        backend = trial.params.get("backend", self.world.backend)
        named = self.options.bench.backend if self.options.bench is not None else ()
        return backend != self.world.backend and backend not in named

    def is_harmless(self, trial: Trial) -> bool:
        """Whether a failure of this trial does not concern the job: the job uses another backend, which works."""
        return self.uses_other_backend(trial) and self.job_backend_works

    @cached_property
    def job_backend_works(self) -> bool:
        """Whether checks ran trials over the job's backend, and all of these trials succeeded."""
        numbers = {
            t.number for t in self.recording.trials if t.params.get("backend") == self.world.backend and not t.may_fail
        }
        return {o.status for o in self.recording.outcomes if o.trial in numbers} == {Status.DONE}

    def number(self, name: str, default: float | None = None) -> float:
        """The threshold `name` of this check, from `--set CODE.name=value`, else `default`, else its declaration."""
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
        is_about_run: bool = False,
        known: KnownError | None = None,
    ) -> Finding:
        """Create the finding `CODE.word`. Defaults: the declared severity, and the hosts of `ranks` as `hosts`.

        `ddpdiag host` tests one host alone, so its findings name no ranks.
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
            is_about_run=is_about_run,
        )
        return finding if known is None else known.explain(finding)


def scope_groups(scope: Scope, world: World) -> tuple[tuple[int, ...], ...]:
    """The groups of a trial with this scope, formed from the living ranks."""
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
    """The plan of most checks: one trial of all ranks in scope. A check without `measure` has no trials."""
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
    late_factor: float | None = None,
) -> Trial:
    """Create a trial of this check; rank 0 gives it a number later.

    `--set CODE.deadline_seconds` sets the deadline. Without this option it is the check's deadline, with more time for
    a large group and for cores that many ranks share.
    """
    check = seen.check
    backend = dict(params or {}).get("backend", seen.world.backend)
    chosen = scope_groups(check.scope, seen.world) if groups is None else groups
    # torch starts the GPUs for every backend but gloo; checks without torch start them through NVML.
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
        late_factor=late_factor,
        first_use_seconds=FIRST_USE_SECONDS if starts_gpus else 0.0,
    )


@dataclass(frozen=True)
class Check(Generic[D]):
    """One check. It is a module that contains `CHECK: Check[Data] = Check(__name__, "HST008", "name", ...)`.

    All other parts are looked up in this module by name. It must have a docstring (the manual page), FINDINGS (all
    findings that the check can make, by the word in their code) and judge(seen). These names are optional:

    - SETTINGS: the thresholds that `--set` can change, with their defaults.
    - Data, measure(ctx): the type of one rank's data, and the function that measures it in a worker.
    - plan(seen): the next trials. The default is one trial of all ranks in scope.
    - skip(seen): the reason not to run the check, or None.
    - report(seen): a Contribution.
    - last_seconds(seen): with this function the check runs after all others (`seen.is_last`), for so many seconds. It
      also runs in its stage if its plan has trials there.
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
        """The thresholds that `--set` can change, with defaults: SETTINGS, and the deadline if the check measures."""
        return {**self.settings, "deadline_seconds": self.deadline} if self.measure is not None else self.settings

    def explained(self, word: str) -> FindingSpec:
        """The declaration of the finding `CODE.word`; KeyError if there is none."""
        return self.findings[word] if word in self.findings else COMMON[word]

    def severity_of(self, word: str) -> Severity:
        """The declared severity of the finding `CODE.word`; TypeError if it depends on the data."""
        severity = self.explained(word).severity
        if severity is None:
            raise TypeError(f"the severity of {self.code}.{word} depends on what was seen")
        return severity

    @property
    def title(self) -> str:
        """The first line of the manual page, without its full stop."""
        return self.manual.strip().splitlines()[0].rstrip(".")
