"""The options of a run, and the earlier run to compare with; recorded, because judgement depends on them."""

from enum import Enum

from msgspec import Struct, field, structs

from ddpdiag.model.bench import Bench, BenchCurve
from ddpdiag.model.train import Train


class Sampling(Enum):
    """The meaning of a figure's values."""

    REPEATS = "repeats"  # repeated measurements, in their order
    SUMMARY = "summary"  # the minimum, the median and the 95th percentile of many measurements
    SINGLE = "single"  # one measurement, whose noise is not known


class Figure(Struct, frozen=True, kw_only=True):
    """One figure of a run, compared with itself in another run.

    `name` is for scripts, with the unit at its end, `title` for people. A lower value is better, unless it is a rate
    (`is_rate`).
    """

    name: str
    title: str
    values: tuple[float, ...]
    sampling: Sampling
    is_rate: bool = False


class Snapshot(Struct, frozen=True, kw_only=True):
    """The figures of a run, and what they depend on.

    `shape` has ranks, hosts and backend in words. `facts` are the "versions" and "variables" that checks read, by name.
    `busy_share` is the share of its cores that a rank had while it computed: the median over time, of the rank with the
    least (None: not measured). `on_gpus`: the ranks computed on GPUs, whose times do not depend on this share.
    """

    created: str
    shape: dict[str, str]
    facts: dict[str, dict[str, str]]
    figures: tuple[Figure, ...]
    series: tuple[BenchCurve, ...] = ()
    busy_share: float | None = None
    on_gpus: bool = False


# The name of the launcher in a run that tests only its own host.
ALONE = "alone"


class Depth(Enum):
    """The amount of measurement: seconds, about a minute, or as long as the budget allows."""

    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"


class Options(Struct, frozen=True, kw_only=True):
    """The options of a run that decide what is planned and how it is judged.

    Empty `stages` and `select` mean all. `select` and `ignore` have codes or prefixes of codes, `settings` the values
    of `--set CODE.name=value`. `budget_seconds` limits the whole run. `port_range` is LOW-HIGH, the ports on which
    stores may listen. `uses_workarounds`: the job will set the variables that were found to help. `topology` names the
    leaf switch (or rack) of hosts for which it is known. `job_left_seconds` is the time that the batch system left to
    the job when this run began (None: not known). `wanted_budget_seconds` is the requested budget, if this time is too
    short for it. `bench` is the request for a benchmark, `train` that for a training by strategies, and `baseline` an
    earlier run for comparison. `alone`: one process tests its own host, without contact to other hosts, with the checks
    that the recording's header names.
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
    port_range: str | None = None
    job_left_seconds: float | None = None
    wanted_budget_seconds: float | None = None
    uses_workarounds: bool = False
    topology: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    bench: Bench | None = None
    train: Train | None = None
    alone: bool = False
    baseline: Snapshot | None = None

    @property
    def for_ranks(self) -> "Options":
        """A copy without the baseline and the topology, which may be long and which only rank 0 reads."""
        return structs.replace(self, topology={}, baseline=None)
