"""The options of a run, and the figures by which two runs are compared. Both are recorded for judgement."""

from enum import Enum

from msgspec import Struct, field, structs

from ddpdiag.model.bench import BenchCurve, BenchRequest
from ddpdiag.model.train import TrainRequest


class Sampling(Enum):
    """The kind of values that a figure has."""

    REPEATS = "repeats"  # repeated measurements, in their order
    SUMMARY = "summary"  # the minimum, the median and the 95th percentile of many measurements
    SINGLE = "single"  # one measurement, whose noise is not known


class Figure(Struct, frozen=True, kw_only=True):
    """One figure of a run, which is compared with the figure of the same name in another run.

    `name` is for scripts and ends with the unit; `title` is for people. Lower values are better, unless `is_rate`.
    """

    name: str
    title: str
    values: tuple[float, ...]
    sampling: Sampling
    is_rate: bool = False


class Snapshot(Struct, frozen=True, kw_only=True):
    """The figures of a run, with the facts on which they depend.

    `shape` has the number of ranks, the number of hosts and the backend, in words. `facts` has the dictionaries
    "versions" and "variables", as checks read them. `series` are the results of a benchmark. `core_share` is the share
    of processor time that a rank had while it computed: the median over time, of the rank with the lowest share (None:
    not measured). `on_gpus`: the ranks computed on GPUs, whose times do not depend on this share.
    """

    created: str
    shape: dict[str, str]
    facts: dict[str, dict[str, str]]
    figures: tuple[Figure, ...]
    series: tuple[BenchCurve, ...] = ()
    core_share: float | None = None
    on_gpus: bool = False


# The launcher's name in a run of `ddpdiag host`, which tests only its own host.
ALONE = "alone"


class Depth(Enum):
    """The time for measurements. QUICK: seconds. STANDARD: about a minute. DEEP: as long as the budget allows."""

    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options that decide what a run measures and how it is judged. Ranks receive them, and recordings keep them.

    They are not the command line (CheckArgs): defaults are resolved, and `topology` and `baseline` are read from files.

    Empty `stages` and `select` mean all. `select` and `ignore` have codes or prefixes of codes, `settings` the values
    of `--set CODE.name=value`. `budget_seconds` limits the whole run. `port_range` is LOW-HIGH, the ports on which
    stores may listen. With `max_slower_share`, a host or rank that slows the job down is an error if it is slower by a
    larger share. `uses_workarounds`: the job will set the variables that avoid the faults found. `topology` maps
    each host to its leaf switch (or rack), if known. `job_left_seconds` is the time that the batch system left to
    the job when this run began (None: not known). If this time was too short, `wanted_budget_seconds` is the budget
    that was requested. `bench` requests a benchmark, `train` a training by strategies. `baseline` has the figures of an
    earlier run. `alone`: one process tests its own host, without other hosts, with the checks that the header names.
    `soak_seconds` is the requested length of the soak (None: no soak).
    """

    depth: Depth = Depth.QUICK
    stages: tuple[str, ...] = ()
    skip_stages: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    backend: str = "auto"
    expect_gpus: int | None = None
    budget_seconds: float = 60.0
    shared_dir: str | None = None
    strict: bool = False
    max_slower_share: float | None = None
    port_range: str | None = None
    job_left_seconds: float | None = None
    wanted_budget_seconds: float | None = None
    uses_workarounds: bool = False
    topology: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    soak_seconds: float | None = None
    bench: BenchRequest | None = None
    train: TrainRequest | None = None
    alone: bool = False
    baseline: Snapshot | None = None

    @property
    def for_ranks(self) -> "RunOptions":
        """A copy without `baseline` and `topology`, which only rank 0 reads and which may be long."""
        return structs.replace(self, topology={}, baseline=None)
