"""What the user asked for; recorded, because judgement depends on it."""

from enum import Enum

from msgspec import Struct, field, structs

from ddpdiag.model.bench import Bench
from ddpdiag.model.snapshot import Snapshot
from ddpdiag.model.train import Train

# The launcher of a run that looks at its own host only.
ALONE = "alone"


class Depth(Enum):
    """How much is measured: seconds, about a minute, or as long as the budget allows."""

    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"


class Options(Struct, frozen=True, kw_only=True):
    """The options of a run that decide what is planned and how it is judged.

    `stages` and `select` empty means all; `select` and `ignore` hold codes or their prefixes;
    `settings` holds `--set CODE.name=value`. `budget_seconds` bounds the whole run.
    `port_range` is LOW-HIGH, the ports on which stores may listen. `uses_workarounds` says that the job will take the
    variables that were found to help. `topology` names the leaf switch (or rack) of hosts, as far as it is known.
    `need_nodes` is how many hosts the job needs, where it could leave some out. `job_left_seconds` is how long the
    batch system would have let the job run on when this run began (None: not known), and `wanted_budget_seconds` the
    budget that was asked for, where that was more. `bench` is what a benchmark measures, `train` what is trained by
    which strategies, `baseline` an earlier run to hold this one against. `alone` is a run of one process that looks at
    its host and asks no other one; it takes the checks that its header names.
    """

    depth: Depth = Depth.QUICK
    stages: tuple[str, ...] = ()
    skip_stages: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    backend: str = "auto"
    expect_gpus: int | None = None
    budget_seconds: float = 60.0
    data_dir: str | None = None
    shared_dir: str | None = None
    strict: bool = False
    port_range: str | None = None
    job_left_seconds: float | None = None
    wanted_budget_seconds: float | None = None
    uses_workarounds: bool = field(default=False, name="exports")
    topology: dict[str, str] = field(default_factory=dict)
    need_nodes: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    bench: Bench | None = None
    train: Train | None = None
    alone: bool = False
    baseline: Snapshot | None = None

    @property
    def for_ranks(self) -> "Options":
        """What ranks need to measure: a baseline and a topology may be long, and only plans and judgement read them."""
        bench = self.bench
        if bench is not None and bench.baseline is not None:
            bench = structs.replace(bench, baseline=None)
        return structs.replace(self, bench=bench, topology={}, baseline=None)
