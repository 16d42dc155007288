"""The ways in which people start PyTorch training, and what came of each.

Times are seconds. What was not measured is `None`.
"""

from enum import Enum

from msgspec import Struct, field

from ddpdiag.model.train import Ended

LAUNCHERS_SCHEMA = "ddpdiag.launchers/1"


class LaunchMethod(Enum):
    """How the ranks of one host are started, under the names that users know; torchrun, first, is the measure."""

    TORCHRUN = "torchrun"
    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    LAUNCH_USE_ENV = "launch --use-env"
    SPAWN = "mp.spawn"
    BY_HAND = "by hand"


class RankTimes(Struct, frozen=True, kw_only=True):
    """What one rank of a training wrote down. Moments are of time.monotonic(), one clock for all processes of a host.

    `learnt_from` says who told it its rank. `began_at`: its first own line ran; `imported_at`: torch was imported;
    `group_at`: every rank had answered in the process group. `step_seconds` holds the timed steps, in their order.
    `threads` is torch.get_num_threads().
    """

    rank: int
    world_size: int
    learnt_from: str
    threads: int
    backend: str
    device: str
    torch_version: str
    began_at: float
    imported_at: float
    group_at: float
    step_seconds: tuple[float, ...]


class RankError(Struct, frozen=True, kw_only=True):
    """Why one rank gave up, and when (time.monotonic()): the earliest is the cause, what follows are echoes."""

    rank: int
    error: str
    at: float


class Start(Struct, frozen=True, kw_only=True):
    """One training, started by one method: what was seen of it from outside, and what its ranks wrote.

    `begun_at` is just before the first command was started. `reason` is empty if all of it worked.
    """

    method: LaunchMethod
    begun_at: float
    seconds: float
    ended: Ended
    reason: str = ""
    ranks: tuple[RankTimes, ...] = ()


class Compare(Struct, frozen=True, kw_only=True):
    """What is compared. `batch_size` counts images of a step over all ranks; each method has its turn once a round."""

    ranks: int
    steps: int = 30
    batch_size: int = 64
    rounds: int = 2
    backend: str = "auto"
    data_dir: str | None = None
    budget_seconds: float = 120.0


class Round(Struct, frozen=True, kw_only=True):
    """One turn that worked. `start_seconds` go from the command's start until the group stood on the slowest rank.

    `launcher_seconds` of them passed until the last rank ran its first line, `import_seconds` is the slowest import of
    torch. `step_seconds` is the median over the timed steps, of the slowest rank.
    """

    start_seconds: float
    launcher_seconds: float
    import_seconds: float
    step_seconds: float
    seconds: float


class LauncherRow(Struct, frozen=True, kw_only=True):
    """One line of the table: the best of all rounds, each figure for itself, and how it stands to torchrun's.

    `threads` are those of each rank, by rank. `command` is what a user would type.
    """

    method: LaunchMethod = field(name="way")
    command: str
    ended: Ended
    reason: str = ""
    learnt_from: str | None = None
    threads: tuple[int, ...] = ()
    start_seconds: float | None = None
    start_ratio: float | None = None
    launcher_seconds: float | None = None
    import_seconds: float | None = None
    step_seconds: float | None = None
    step_ratio: float | None = None
    rounds: tuple[Round, ...] = ()


class Control(Struct, frozen=True, kw_only=True):
    """The experiment that shows whether threads explain the steps: `method`, with torchrun's OMP_NUM_THREADS."""

    method: LaunchMethod = field(name="way")
    omp_num_threads: int
    threads: tuple[int, ...]
    step_seconds: float
    step_ratio: float


class LaunchersReport(Struct, frozen=True, kw_only=True):
    """The table, judged. `explained` are sentences on what makes the difference, each from what was measured."""

    asked: Compare
    host: str
    cores: int
    seconds: float
    rows: tuple[LauncherRow, ...]
    explained: tuple[str, ...]
    sentence: str
    exit_code: int
    control: Control | None = None
    device: str | None = None
    backend: str | None = None
    torch_version: str | None = None
    schema: str = LAUNCHERS_SCHEMA
