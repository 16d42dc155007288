"""Findings, and the report whose JSON form docs/report.schema.json fixes."""

from enum import Enum

from msgspec import Struct, field

from ddpdiag.model.bench import BenchReport
from ddpdiag.model.options import Snapshot
from ddpdiag.model.train import TrainReport

Scalar = str | int | float | bool | None

SCHEMA = "ddpdiag.report/1"
# The key in a finding's evidence for the name of the card, if a known error text explains the finding. Its title,
# message and fix are then those of the card, and all that most readers need.
KNOWN_ERROR = "known_error"


class Severity(Enum):
    """The meaning of a finding for the job: it will fail, it may suffer, or it is not affected."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Verdict(Enum):
    """Whether the allocation can train. UNKNOWN: something that matters could not be checked."""

    FIT = "fit"
    UNFIT = "unfit"
    UNKNOWN = "unknown"


class Finding(Struct, frozen=True, kw_only=True):
    """One judgement: the subject, the numbers, and the fix.

    `code` is "<check code>.<word>". `ranks`, `hosts`, `gpus` (UUIDs) and `links` ("h1 -> h2") are blamed;
    all are empty when the evidence cannot decide. `env` holds variables that help (None: unset). `of_the_run` findings
    concern the request, the layout or the end of the run, and blame no rank or host.
    """

    code: str
    severity: Severity
    title: str
    message: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    evidence: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
    fix: str = ""
    env: dict[str, str | None] = field(default_factory=dict)
    of_the_run: bool = False


class Matrix(Struct, frozen=True, kw_only=True):
    """A measurement or property of every pair: `cells[i][j]` is that of the link from `rows[i]` to `columns[j]`.

    `name` is for scripts ("p2p.copy.n0"), `title` for people. `unit` is "bytes_per_s", or empty for words; a cell is
    None where nothing is known. `gpus` are the UUIDs of the rows or columns that are GPUs.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Scalar, ...], ...]
    unit: str = ""
    gpus: dict[str, str] = field(default_factory=dict)


class WorldLine(Struct, frozen=True, kw_only=True):
    """The world in the report. `leaves` are the hosts under each leaf switch, as far as they are known.

    `scheduler` is "slurm" where ranks ran in a job of Slurm, else empty.
    """

    size: int
    hosts: tuple[str, ...]
    launcher: str
    backend: str
    leaves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scheduler: str = ""


class StageLine(Struct, frozen=True, kw_only=True):
    """One stage in the report; `status` is the worst of its checks, "interrupted" where a signal ended the run.

    `severity` is the severity of the worst finding about the stage, and `codes` are the codes of all of them, including
    findings of checks of the run (RUN001 to RUN004) about its trials or about ranks that never joined. `note` is a fact
    that the lines of its checks do not state: "2 of 6 ranks never joined".
    """

    name: str
    status: str
    seconds: float
    severity: Severity | None = None
    codes: tuple[str, ...] = ()
    note: str = ""


class CheckLine(Struct, frozen=True, kw_only=True):
    """One check in the report.

    `statuses` counts its outcomes by status; `affected` those of ranks that failed only because of a blamed rank.
    `measures` is False for a check that measures nothing and judges the data of other checks.
    """

    code: str
    name: str
    stage: str
    statuses: dict[str, int]
    skipped_because: str | None = None
    measures: bool = True
    affected: dict[str, int] = field(default_factory=dict)

    @property
    def endings(self) -> dict[str, int]:
        """The number of outcomes by status. Affected ranks count as "affected" in place of their status."""
        own = {status: number - self.affected.get(status, 0) for status, number in self.statuses.items()}
        own["affected"] = sum(self.affected.values())
        return {status: number for status, number in own.items() if number}


# The parts of a host, in the order in which they are shown. NONE: a check knows that the host has no such part.
INVENTORY = ("GPU", "CPU", "memory", "driver", "torch", "CUDA", "NCCL", "network", "RDMA")
NONE, UNKNOWN = "none", "unknown"


class HostKind(Struct, frozen=True, kw_only=True):
    """Hosts with the same `parts`: each part of INVENTORY in words, NONE or UNKNOWN."""

    hosts: tuple[str, ...]
    parts: dict[str, str]


class HostsLine(Struct, frozen=True, kw_only=True):
    """Hosts to leave out of the next job (`failing`), and `healthy` ones.

    No error or warning blames a healthy host, and it took part to the end.
    Where pairs of hosts were measured, the fastest of the healthy ones come first. `slow` are hosts that only warnings
    name, with the share by which each is slower than most: the job runs, and waits for them. `notes` say why hosts
    are in neither list, and which checks could not test the healthy ones.
    """

    failing: tuple[str, ...] = ()
    healthy: tuple[str, ...] = ()
    slow: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """The JSON report; docs/report.schema.json is generated from it.

    Each of `ranks` has at least rank, local_rank, host, gpu_uuid; checks add their own columns, with the unit in the
    name. `bench` is set if a benchmark was run, `train` if strategies were tried. `workarounds` are the variables that
    the job needs, as they were tried (None: unset). `inventory` has the parts of each kind of host. `degraded`: the
    verdict is "fit", and a host or rank that a warning names slows the job down. `created` is the start of the run, UTC
    in ISO 8601, by the clock of rank 0's host. `version` is the version of ddpdiag that recorded the run. `snapshot`
    has the figures for a comparison with another run.
    """

    schema: str = SCHEMA
    verdict: Verdict
    sentence: str
    exit_code: int
    seconds: float
    budget_seconds: float
    run_id: str
    world: WorldLine
    ranks: tuple[dict[str, Scalar], ...]
    stages: tuple[StageLine, ...]
    checks: tuple[CheckLine, ...]
    findings: tuple[Finding, ...]
    measurements: dict[str, Scalar] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hosts: HostsLine = HostsLine()
    bench: BenchReport | None = None
    train: TrainReport | None = None
    matrices: tuple[Matrix, ...] = ()
    workarounds: dict[str, str | None] = field(default_factory=dict)
    inventory: tuple[HostKind, ...] = ()
    created: str = ""
    version: str = ""
    snapshot: Snapshot | None = None
    degraded: bool = False

    @property
    def verdict_text(self) -> str:
        """The verdict for people: "FIT", "FIT, degraded", "UNFIT" or "UNKNOWN"."""
        return f"{self.verdict.value.upper()}{', degraded' if self.degraded else ''}"

    def __str__(self) -> str:
        return f"{self.verdict_text}: {self.sentence}"
