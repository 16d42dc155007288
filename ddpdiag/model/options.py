"""The options of a run, and the earlier run to compare with; recorded, because judgement depends on them."""

from enum import Enum

from msgspec import Struct, field, structs

from ddpdiag.model.bench import Bench, BenchCurve
from ddpdiag.model.train import Train


class Sampling(Enum):
    """The meaning of a figure's values: repeats, in the order of their measurement; the quickest, the median and the
    95th percentile of many; or a single one, whose noise is not known."""

    REPEATS = "repeats"
    SUMMARY = "summary"
    SINGLE = "single"


class Figure(Struct, frozen=True, kw_only=True):
    """One figure of a run, compared with itself in another run.

    `name` is for scripts, with the unit at its end, `title` for people. Less is better, unless the unit is a rate
    (`is_rate`).
    """

    name: str
    title: str
    values: tuple[float, ...]
    sampling: Sampling
    is_rate: bool = False


class Snapshot(Struct, frozen=True, kw_only=True):
    """The figures of a run, and what they depend on.

    `shape` are ranks, hosts, backend; `facts` are "versions" and "variables", each by name, as far as they were looked
    at. `busy_share` is the share of their cores that the ranks had when they computed, in the median of the rank that
    had least; None where no check looked. `on_gpus` says that they computed on GPUs, whose times do not depend on that.
    """

    created: str
    shape: dict[str, str]
    facts: dict[str, dict[str, str]]
    figures: tuple[Figure, ...]
    series: tuple[BenchCurve, ...] = ()
    busy_share: float | None = None
    on_gpus: bool = False


# The launcher of a run that looks at its own host only.
ALONE = "alone"


class Depth(Enum):
    """The amount of measurement: seconds, about a minute, or as long as the budget allows."""

    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"


class Options(Struct, frozen=True, kw_only=True):
    """The options of a run that decide what is planned and how it is judged.

    `stages` and `select` empty means all; `select` and `ignore` hold codes or their prefixes;
    `settings` holds `--set CODE.name=value`. `budget_seconds` bounds the whole run.
    `port_range` is LOW-HIGH, the ports on which stores may listen. `uses_workarounds` says that the job will take the
    variables that were found to help. `topology` names the leaf switch (or rack) of hosts, as far as it is known.
    `job_left_seconds` is how long the batch system would have let the job run on when this run began (None: not known),
    and `wanted_budget_seconds` the budget that was asked for, where that was more. `bench` is what a benchmark
    measures, `train` what is trained by which strategies, `baseline` an earlier run to hold this one against. `alone`
    is a run of one process that looks at its host and asks no other one; it takes the checks that its header names.
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
        """The options without a baseline and a topology, which may be long, and which only rank 0 reads."""
        return structs.replace(self, topology={}, baseline=None)
