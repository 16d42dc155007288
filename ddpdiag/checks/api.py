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
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.world import World, extra_deadline_seconds
from ddpdiag.codec import decode
from ddpdiag.model import (
    Counters,
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
    """The ranks of a trial. A check with the scope WORLD is skipped if a rank can no longer take part."""

    RANK = "rank"  # each rank alone
    HOST = "host"  # one rank of each host, alone
    WORLD = "world"  # all ranks together
    LIVING = "living"  # all ranks that can take part, together


class SkipKind(Enum):
    """The meaning of a skipped check for the verdict."""

    INAPPLICABLE = "it does not apply here (no GPU, one host); a failure if the check or its stage was requested"
    OPTIONAL = "it does not apply here; a failure only if the check's own code was requested"
    UNNEEDED = "other checks leave nothing to do; never a failure"
    BLOCKED = "it should run, and what it needs failed in other checks"


class SkipReason(NamedTuple):
    """The reason why a check is not run, and what this means for the verdict (`kind`)."""

    text: str
    kind: SkipKind

    def skip(self, check: "Check[Any]", options: RunOptions) -> Skip:
        """Create the recording's line about the skipped check. The options decide whether the skip is a failure."""
        match self.kind:
            case SkipKind.INAPPLICABLE:
                is_selected = bool(options.select) and check.code.startswith(options.select)
                is_justified = check.stage.value not in options.stages and not is_selected
            case SkipKind.OPTIONAL:
                is_justified = check.code not in options.select
            case SkipKind.UNNEEDED | SkipKind.BLOCKED:
                is_justified = self.kind is SkipKind.UNNEEDED
        return Skip(code=check.code, reason=self.text, is_inapplicable=is_justified)


# These functions return a reason of their kind, or None if `text` is None.
def inapplicable(text: str | None) -> SkipReason | None:
    return SkipReason(text, SkipKind.INAPPLICABLE) if text is not None else None


def optional(text: str | None) -> SkipReason | None:
    return SkipReason(text, SkipKind.OPTIONAL) if text is not None else None


def unneeded(text: str | None) -> SkipReason | None:
    return SkipReason(text, SkipKind.UNNEEDED) if text is not None else None


def blocked(text: str | None) -> SkipReason | None:
    return SkipReason(text, SkipKind.BLOCKED) if text is not None else None


class Nothing(Struct, frozen=True):
    """The data of a check that measures nothing and judges the data of other checks."""


class Row(NamedTuple, Generic[D]):
    """The data that one rank measured in one trial."""

    place: Place
    data: D
    trial: Trial


class MovedFinding(NamedTuple):
    """A finding that the report shows under the stage `shown_under` (a stage, or the code of a check in it).

    `affected_counts` counts, by status, the outcomes of ranks that failed only because of the blamed ranks.
    """

    shown_under: Stage | str
    finding: Finding
    affected_counts: Mapping[str, int] = {}


class Contribution(Struct, frozen=True, kw_only=True):
    """Everything that a check adds to the report in addition to its findings.

    `columns` holds figures by rank, and `figures` those of the whole run; their names include the units. `matrices` are
    figures of pairs. `inventory` names the parts of a host (keys: INVENTORY) under one of its ranks. `counters` are
    those of GPUs, ports and TCP. `section` is set if the run was made for this check. `moved_findings` are shown under
    other stages. `excuse(error)` returns a sentence if the error, of any check, does not concern the job; else None.
    `workarounds` are environment variables that the job needs (None: the variable must be unset).
    """

    columns: Mapping[int, Mapping[str, Scalar]] = {}
    figures: Mapping[str, Scalar] = {}
    matrices: tuple[Matrix, ...] = ()
    inventory: Mapping[int, Mapping[str, str]] = {}
    counters: tuple[Counters, ...] = ()
    section: Section | None = None
    moved_findings: tuple[MovedFinding, ...] = ()
    excuse: Callable[[Finding], str | None] | None = None
    workarounds: Mapping[str, str | None] = {}


@dataclass(frozen=True, eq=False)
class Seen(Generic[D]):
    """One check's view of a run: the check's trials and outcomes. `of(other)` returns the view of another check.

    Set only for planning: `left_seconds`, the time that the budget leaves, and `is_last`: all other checks have run.
    `findings_by_code` and `sections` hold the findings and report sections of the checks that were judged before.
    """

    world: World
    check: "Check[D]"
    recording: Recording
    left_seconds: float = math.inf
    is_last: bool = False
    findings_by_code: dict[str, tuple[Finding, ...]] = field(default_factory=dict, repr=False)
    sections: tuple[Section, ...] = ()

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """The trials of this check that have run, in order."""
        return tuple(trial for trial in self.recording.trials if trial.code == self.check.code)

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of this check's trials, in the order in which they were recorded."""
        return tuple(outcome for outcome in self.recording.outcomes if outcome.code == self.check.code)

    @cached_property
    def rows(self) -> tuple[Row[D], ...]:
        """The data of each outcome with status DONE."""
        return self._rows((o, o.data) for o in self.outcomes if o.status is Status.DONE)

    @cached_property
    def all_rows(self) -> tuple[Row[D], ...]:
        """The data of each outcome: all of it if DONE, else the part reported before the trial was cut short."""
        pairs = ((o, o.data if o.status is Status.DONE else o.partial_data) for o in self.outcomes)
        return self._rows((o, data) for o, data in pairs if bytes(data) != bytes(NO_DATA))

    def _rows(self, pairs: Iterable[tuple[Outcome, Raw]]) -> tuple[Row[D], ...]:
        trials, places = {trial.number: trial for trial in self.trials}, self.world.places
        return tuple(
            Row(places[o.rank], decode(data, self.check.data_type), trials[o.trial])
            for o, data in pairs
            if o.rank in places and o.trial in trials
        )

    @cached_property
    def by_rank(self) -> dict[int, D]:
        """Each rank's data from its last trial with status DONE."""
        return {row.place.rank: row.data for row in self.rows}

    @property
    def options(self) -> RunOptions:
        return self.world.options

    def of(self, other: "Check[E]") -> "Seen[E]":
        """Return the view of the same run for the check `other`."""
        return Seen(self.world, other, self.recording, findings_by_code=self.findings_by_code)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of this check. The first use judges the check and stores the result in `findings_by_code`."""
        code = self.check.code
        if code not in self.findings_by_code:
            self.findings_by_code[code] = tuple(self.check.judge(self))
        return self.findings_by_code[code]

    def findings_of(self, code: str) -> tuple[Finding, ...]:
        """The findings of another check, which must run before this one."""
        return self.of(check_by_code(code)).findings

    def succeeded(self, trial: Trial) -> bool:
        """Whether the trial was DONE on every rank that took part."""
        return {o.status for o in self.outcomes if o.trial == trial.number} == {Status.DONE}

    @property
    def failure_text(self) -> str | None:
        """A clause that says that a trial failed over the job's or a requested backend; None if all succeeded."""
        if all(self.succeeded(trial) for trial in self.trials if not self.uses_other_backend(trial)):
            return None
        return f"{self.check.code} ({self.check.name}) did not go well"

    def uses_other_backend(self, trial: Trial) -> bool:
        """Whether the trial uses a backend that is neither the job's nor requested."""
        backend = trial.params.get("backend", self.world.backend)
        requested = self.options.bench.backend if self.options.bench is not None else ()
        return backend != self.world.backend and backend not in requested

    def is_harmless(self, trial: Trial) -> bool:
        """Whether a failure of this trial does not concern the job, because the job's own backend differs and works."""
        return self.uses_other_backend(trial) and self.job_backend_works

    @cached_property
    def job_backend_works(self) -> bool:
        """Whether trials over the job's backend ran, apart from those that may fail, and all ranks succeeded."""
        trial_numbers = {
            t.number for t in self.recording.trials if t.params.get("backend") == self.world.backend and not t.may_fail
        }
        return {o.status for o in self.recording.outcomes if o.trial in trial_numbers} == {Status.DONE}

    def setting(self, name: str, default: float | None = None) -> float:
        """Return the setting `name`: the value of `--set CODE.name=VALUE`, else `default`, else the declared one."""
        declared = self.check.thresholds[name] if default is None else default
        return float(self.options.settings.get(f"{self.check.code}.{name}", declared))

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
        known_error: KnownError | None = None,
    ) -> Finding:
        """Create the finding `CODE.word`. By default it has its declared severity, and the hosts of `ranks`.

        `known_error` adds the meaning of a quoted error text. Findings of `ddpdiag host` (one host) name no ranks.
        """
        finding = Finding(
            code=f"{self.check.code}.{word}",
            severity=self.check.severity_of(word) if severity is None else severity,
            title=title,
            message=message,
            ranks=() if self.options.alone else tuple(ranks),
            hosts=tuple(hosts) if hosts is not None else self.world.host_names(ranks),
            gpus=tuple(gpus),
            links=tuple(links),
            evidence=dict(evidence or {}),
            fix=fix,
            env=dict(env or {}),
            is_about_run=is_about_run,
        )
        return finding if known_error is None else known_error.explain(finding)


def scope_groups(scope: Scope, world: World) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks of a trial with this scope. Only living ranks are in a group."""
    living = world.living_ranks
    match scope:
        case Scope.WORLD | Scope.LIVING:
            return (living,) if living else ()
        case Scope.RANK:
            return tuple((rank,) for rank in living)
        case Scope.HOST:
            living_ranks = set(living)
            leaders = (next((r for r in ranks if r in living_ranks), None) for ranks in world.hosts.values())
            return tuple((rank,) for rank in leaders if rank is not None)


def plan_one_trial(seen: Seen[D]) -> Sequence[Trial]:
    """Plan one trial of all ranks in scope, as most checks do; none if it has run, or without `measure`."""
    return () if seen.trials or seen.check.measure is None else (new_trial(seen),)


# Time to connect one more rank. gloo connects each rank to all others: 128 ranks on 2 cores took 17 s (torch 2.13).
CONNECT_SECONDS_PER_RANK = 0.15
# Time for the first use of GPU and NCCL. A healthy machine took 55 s for NCCL's first communicator, 52 s of this to
# load kernels (NCCL issue 1646), and 25 to 35 s to start eight GPUs without persistence mode (Azure/AgentBaker 2829).
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
    """Create a trial of this check. Rank 0 numbers it later. The other parameters are fields of `Trial`.

    The option `--set CODE.deadline_seconds=N` sets the deadline. By default it is the check's deadline, plus time for
    the connections of a large group and for ranks that share a core.
    """
    check = seen.check
    backend = dict(params or {}).get("backend", seen.world.backend)
    rank_groups = scope_groups(check.scope, seen.world) if groups is None else groups
    # torch starts the GPUs for every backend but gloo; checks without torch start them through NVML.
    starts_gpus = backend != "gloo" if check.kind is Kind.TORCH else check.stage in (Stage.GPU, Stage.P2P)
    largest = max(map(len, rank_groups), default=1)
    connect_seconds = CONNECT_SECONDS_PER_RANK * largest if largest > 1 else 0.0
    deadline = check.deadline + connect_seconds + extra_deadline_seconds(seen.world.ranks_per_core)
    return Trial(
        code=check.code,
        groups=rank_groups,
        kind=check.kind,
        deadline_seconds=seen.setting("deadline_seconds", deadline),
        params=dict(params or {}),
        env=dict(env or {}),
        fresh=fresh,
        may_fail=may_fail,
        late_factor=late_factor,
        first_use_seconds=FIRST_USE_SECONDS if starts_gpus else 0.0,
    )


@dataclass(frozen=True)
class Check(Generic[D]):
    """One check. Its module declares it with `CHECK: Check[Data] = Check(__name__, "HST008", "name", ...)`.

    All other parts of the check are looked up in that module by name. The module must have a docstring (the manual
    page), FINDINGS (the declaration of each finding, by the word in its code) and judge(seen). These are optional:

    - SETTINGS: the thresholds that `--set` can change, with their defaults.
    - Data, measure(ctx): the type of one rank's data, and the function that measures it in a worker.
    - plan(seen): returns the next trials. The default is one trial of all ranks in scope.
    - skip(seen): returns the reason not to run the check, or None.
    - report(seen): returns a Contribution.
    - last_seconds(seen): a check with this function runs after all others (`seen.is_last`). The function returns the
      expected seconds of this run. The check also runs in its stage if its plan has trials there.
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
    def data_type(self) -> type[D]:
        return self._by_name("Data", cast("type[D]", Nothing))

    @cached_property
    def measure(self) -> Callable[[Context], D] | None:
        return self._by_name("measure", None)

    @cached_property
    def plan(self) -> Callable[[Seen[D]], Sequence[Trial]]:
        return self._by_name("plan", plan_one_trial)

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
        """The default of each threshold that `--set` can change: SETTINGS, and the deadline if the check measures."""
        return {**self.settings, "deadline_seconds": self.deadline} if self.measure is not None else self.settings

    def spec_of(self, word: str) -> FindingSpec:
        """Return the declaration of the finding `CODE.word`. Raises KeyError if there is none."""
        return self.findings[word] if word in self.findings else COMMON[word]

    def severity_of(self, word: str) -> Severity:
        """Return the declared severity of the finding `CODE.word`. Raises TypeError if it depends on the data."""
        severity = self.spec_of(word).severity
        if severity is None:
            raise TypeError(f"the severity of {self.code}.{word} depends on what was seen")
        return severity

    @property
    def title(self) -> str:
        """The first line of the manual page, without its full stop."""
        return self.manual.strip().splitlines()[0].rstrip(".")
