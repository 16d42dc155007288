"""Findings and the report. docs/report.schema.json describes the JSON form of the report."""

from enum import Enum

from msgspec import Struct, field

from ddpdiag.model.bench import BenchReport
from ddpdiag.model.options import Snapshot
from ddpdiag.model.train import TrainReport

Scalar = str | int | float | bool | None

SCHEMA = "ddpdiag.report/1"
# A finding that a card of known errors explains has the card's title, message and fix. Under this key, the evidence of
# the finding has the name of the card.
KNOWN_ERROR = "known_error"


class Severity(Enum):
    """The effect of a finding. ERROR: the job will fail. WARNING: the job may suffer. NOTE: the job is not affected."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Verdict(Enum):
    """Whether the allocation can train. UNKNOWN: something that matters could not be checked."""

    FIT = "fit"
    UNFIT = "unfit"
    UNKNOWN = "unknown"


class Finding(Struct, frozen=True, kw_only=True):
    """One fault or fact that a check reports: what is affected, the measured numbers, and the fix.

    `code` is "<check code>.<word>". `ranks`, `hosts`, `gpus` (UUIDs) and `links` ("h1 -> h2") are blamed. All four are
    empty if the evidence cannot decide. `env` holds environment variables that avoid the fault (None: unset the
    variable). A finding with `is_about_run` concerns the request, the layout or the end of the run, and blames none.
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
    is_about_run: bool = False


class Matrix(Struct, frozen=True, kw_only=True):
    """A table of pairs: `cells[i][j]` is the measurement or property of the link from `rows[i]` to `columns[j]`.

    `name` is for scripts ("p2p.copy.n0"), `title` for people. `unit` is "bytes_per_s", or empty if the cells are words.
    A cell is None if its value is unknown. `gpus` maps each row or column that is a GPU to its UUID.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Scalar, ...], ...]
    unit: str = ""
    gpus: dict[str, str] = field(default_factory=dict)


class WorldSummary(Struct, frozen=True, kw_only=True):
    """The world in the report: its number of ranks (`size`), its hosts, the launcher and the backend.

    `hosts_by_leaf_switch` has only hosts whose leaf switch is known. `scheduler` is "slurm" if ranks ran in a job of
    Slurm, else empty.
    """

    size: int
    hosts: tuple[str, ...]
    launcher: str
    backend: str
    hosts_by_leaf_switch: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scheduler: str = ""


class StageSummary(Struct, frozen=True, kw_only=True):
    """One stage in the report. `status` is the worst status of its checks, or "interrupted" after a signal.

    `codes` are the codes of all findings about the stage, and `severity` is the severity of the worst (None: no
    findings). They include findings of RUN001 to RUN004 about trials of the stage or about ranks that never joined.
    `detail` is a fact that the checks of the stage do not state, such as "2 of 6 ranks never joined", or empty.
    """

    name: str
    status: str
    seconds: float
    severity: Severity | None = None
    codes: tuple[str, ...] = ()
    detail: str = ""


class CheckSummary(Struct, frozen=True, kw_only=True):
    """One check in the report.

    `statuses` counts the outcomes by status. `affected_counts` counts, by status, the outcomes of ranks that failed
    only because of a blamed rank. `measures` is False for a check that only judges the data of other checks.
    """

    code: str
    name: str
    stage: str
    statuses: dict[str, int]
    skipped_because: str | None = None
    measures: bool = True
    affected_counts: dict[str, int] = field(default_factory=dict)

    @property
    def outcome_counts(self) -> dict[str, int]:
        """The number of outcomes by status. Outcomes of affected ranks are counted only under "affected"."""
        counts = {status: number - self.affected_counts.get(status, 0) for status, number in self.statuses.items()}
        counts["affected"] = sum(self.affected_counts.values())
        return {status: number for status, number in counts.items() if number}


# The parts of a host, in the order in which reports show them. NONE: a check knows that the host has no such part.
INVENTORY = ("GPU", "CPU", "memory", "kernel", "driver", "torch", "CUDA", "NCCL", "network", "RDMA")
NONE, UNKNOWN = "none", "unknown"


class HostKind(Struct, frozen=True, kw_only=True):
    """Hosts with the same parts. `parts` describes each part of INVENTORY in words, or is NONE or UNKNOWN."""

    hosts: tuple[str, ...]
    parts: dict[str, str]


class Counters(Struct, frozen=True, kw_only=True):
    """Counters of one part of a host, which count on after the run: two reports show how often they rose between them.

    `part` is the UUID of a GPU, the name of a network port ("eth0", "mlx5_0:1"), or TCP_PART. `totals` has the counters
    that are not 0: those of a GPU since its driver was loaded (row remaps: of its whole life), of a port or of TCP
    since the start of the host.
    """

    host: str
    part: str
    totals: dict[str, int] = {}


# All TCP connections of a host. The counters are `sent_segments`, `resent_segments`, those of them that the receiver
# already had (`needless_segments`), and `damaged_segments`.
TCP_PART = "TCP"


class HostLists(Struct, frozen=True, kw_only=True):
    """The hosts that the next job should leave out (`failing`), the `healthy` hosts, and the `slow` hosts.

    A healthy host took part to the end, and no error or warning blames it. If pairs of hosts were measured, the fastest
    healthy host is first. Only warnings name a slow host: the job runs, but waits for it. The value in `slow` is the
    share by which the host is slower than most hosts. `caveats` are sentences that say why hosts are in neither of the
    lists `failing` and `healthy`, and which checks could not test the healthy hosts.
    """

    failing: tuple[str, ...] = ()
    healthy: tuple[str, ...] = ()
    slow: dict[str, float] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """The JSON report. docs/report.schema.json is generated from this struct.

    Each row of `ranks` has at least rank, local_rank, host, gpu_uuid. Checks add columns, with the unit in the name.
    `recording_problems` are sentences about faults of the recording, such as unreadable lines. `bench` is set if a
    benchmark ran, `train` if strategies ran. `workarounds` are the environment variables that the job needs; they were
    tested (None: unset the variable). `degraded`: the verdict is FIT, but a host or rank that a warning names slows the
    job down. `created` is the start of the run, UTC in ISO 8601, by the clock of rank 0's host. `version` is the
    version of ddpdiag that recorded the run. `snapshot` has the figures for a comparison with another run.
    """

    schema: str = SCHEMA
    verdict: Verdict
    sentence: str
    exit_code: int
    seconds: float
    budget_seconds: float
    run_id: str
    world: WorldSummary
    ranks: tuple[dict[str, Scalar], ...]
    stages: tuple[StageSummary, ...]
    checks: tuple[CheckSummary, ...]
    findings: tuple[Finding, ...]
    measurements: dict[str, Scalar] = field(default_factory=dict)
    recording_problems: tuple[str, ...] = ()
    hosts: HostLists = HostLists()
    bench: BenchReport | None = None
    train: TrainReport | None = None
    matrices: tuple[Matrix, ...] = ()
    workarounds: dict[str, str | None] = field(default_factory=dict)
    inventory: tuple[HostKind, ...] = ()
    counters: tuple[Counters, ...] = ()
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
