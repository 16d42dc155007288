"""How people start PyTorch training, the command lines of that, and the outcome of each.

Times are seconds. What was not measured is `None`.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

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

    `learnt_from` is the source of its rank. `began_at`: its first own line ran; `imported_at`: torch was imported;
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
    """One turn that worked. `start_seconds` go from the command's start until the slowest rank was in the group.

    `launcher_seconds` of them passed until the last rank ran its first line, `import_seconds` is the slowest import of
    torch. `step_seconds` is the median over the timed steps, of the slowest rank.
    """

    start_seconds: float
    launcher_seconds: float
    import_seconds: float
    step_seconds: float
    seconds: float


class LauncherRow(Struct, frozen=True, kw_only=True):
    """One line of the table: the best of all rounds, each figure for itself, and its ratio to torchrun's.

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


# Command lines -------------------------------------------------------------------------------------------------------

# What torchrun and torch.distributed.launch take is in torch/distributed/run.py and launch.py.
MODULE = "ddpdiag.strategies.launchers.training"
LOOPBACK = "127.0.0.1"
# How the commands of torch's launchers begin.
_HEADS = {
    LaunchMethod.TORCHRUN: ("torchrun",),
    LaunchMethod.RUN: ("python", "-m", "torch.distributed.run"),
    LaunchMethod.LAUNCH: ("python", "-m", "torch.distributed.launch"),
    LaunchMethod.LAUNCH_USE_ENV: ("python", "-m", "torch.distributed.launch", "--use-env"),
}
# The launcher of a rank sets these again: what an earlier job left in the shell must not decide.
_STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Command(Struct, frozen=True):
    """One process to start: its words, and the variables that its launch method sets beside the user's."""

    words: tuple[str, ...]
    variables: dict[str, str] = {}


class Tools(Struct, frozen=True, kw_only=True):
    """What is installed: the Python that runs this, and its torch's `torchrun` (None: there is none)."""

    python: str
    torchrun: str | None


def installed() -> Tools:
    """This Python, and the `torchrun` that came with its torch; else one beside this Python, else one on PATH."""
    python = Path(sys.executable)
    beside = [str(path) for path in (*_recorded("torchrun"), python.with_name("torchrun")) if os.access(path, os.X_OK)]
    return Tools(python=sys.executable, torchrun=beside[0] if beside else shutil.which("torchrun"))


def _recorded(script: str) -> Iterator[Path]:
    """Where torch's installer put a script of torch's, without importing torch."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return
    for file in torch.files or ():
        if file.name == script:
            yield Path(str(torch.locate_file(file))).resolve()


def commands(
    method: LaunchMethod, tools: Tools, asked: Compare, *, port: int, out: str, seconds: float
) -> tuple[Command, ...] | None:
    """What to start, in this order; None if the tool is not there. All but "by hand" are one command."""
    training = ("-m", MODULE, *arguments(asked, out=out, seconds=seconds))
    count = str(asked.ranks)
    where = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    if method is LaunchMethod.SPAWN:
        return (Command((tools.python, *training, "--spawn", count), where),)
    if method is LaunchMethod.BY_HAND:
        ranks = ({"RANK": str(rank), "WORLD_SIZE": count} for rank in range(asked.ranks))
        return tuple(Command((tools.python, *training), {**rank, **where}) for rank in ranks)
    program, *options = _HEADS[method]
    path = tools.torchrun if program == "torchrun" else tools.python
    if path is None:
        return None
    return (Command((path, *options, "--nproc-per-node", count, "--master-port", str(port), *training)),)


def arguments(asked: Compare, *, out: str, seconds: float) -> tuple[str, ...]:
    """The options of the training, the same for every method."""
    words = {
        "--out": out,
        "--steps": str(asked.steps),
        "--batch-size": str(asked.batch_size),
        "--backend": asked.backend,
        "--seconds": f"{seconds:.0f}",
        "--data-dir": asked.data_dir,
    }
    return tuple(word for name, value in words.items() if value is not None for word in (name, value))


def typed(method: LaunchMethod, ranks: int) -> str:
    """What a user would type for a script of their own."""
    if method is LaunchMethod.SPAWN:
        return f"python train.py, which calls torch.multiprocessing.spawn(main, nprocs={ranks})"
    if method is LaunchMethod.BY_HAND:
        return f"RANK=0 WORLD_SIZE={ranks} MASTER_ADDR=... MASTER_PORT=... python train.py, once for each rank"
    return f"{' '.join(_HEADS[method])} --nproc-per-node {ranks} train.py"


def environment(env: Mapping[str, str], own: Mapping[str, str], *, python: str, folder: str) -> dict[str, str]:
    """The user's environment for a command, without what an earlier launch left there; `own` wins over it.

    `folder` takes the temporary files of launchers.
    """
    return {
        **{name: value for name, value in env.items() if name not in _STALE},
        # A module in the user's current directory must not take the place of one of the standard library.
        "PYTHONSAFEPATH": "1",
        "PYTHON_EXEC": python,  # torchrun's ranks run under the Python that runs this, wherever torchrun comes from
        "TMPDIR": folder,
        **own,
    }
