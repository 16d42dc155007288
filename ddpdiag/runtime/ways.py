"""The command lines of each way of starting a training on one host.

What torchrun and torch.distributed.launch take is in torch/distributed/run.py and launch.py.
"""

from collections.abc import Mapping

from msgspec import Struct

from ddpdiag.model.launching import Compare, Way
from ddpdiag.runtime.said import Environ

MODULE = "ddpdiag.workloads.launched"
LOOPBACK = "127.0.0.1"
_LAUNCH = ("-m", "torch.distributed.launch")
# Whoever starts a rank sets these anew: what an earlier job left in the shell must not decide.
_STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Command(Struct, frozen=True):
    """One process to start: its words, and the variables that its way of starting sets beside the user's."""

    words: tuple[str, ...]
    variables: dict[str, str] = {}


class Tools(Struct, frozen=True, kw_only=True):
    """What is installed: the Python that runs us, and its torch's `torchrun` (None: there is none)."""

    python: str
    torchrun: str | None


def commands(
    way: Way, tools: Tools, asked: Compare, *, port: int, out: str, seconds: float
) -> tuple[Command, ...] | None:
    """What to start, in this order; None if the tool is not there. All but "by hand" are one command."""
    training = ("-m", MODULE, *arguments(asked, out=out, seconds=seconds))
    count = str(asked.ranks)
    launcher = ("--nproc-per-node", count, "--master-port", str(port))
    where = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    match way:
        case Way.SPAWN:
            return (Command((tools.python, *training, "--spawn", count), where),)
        case Way.TORCHRUN:
            return None if tools.torchrun is None else (Command((tools.torchrun, *launcher, *training)),)
        case Way.RUN:
            return (Command((tools.python, "-m", "torch.distributed.run", *launcher, *training)),)
        case Way.LAUNCH:
            return (Command((tools.python, *_LAUNCH, *launcher, *training)),)
        case Way.LAUNCH_USE_ENV:
            return (Command((tools.python, *_LAUNCH, "--use-env", *launcher, *training)),)
        case Way.BY_HAND:
            ranks = ({"RANK": str(rank), "WORLD_SIZE": count} for rank in range(asked.ranks))
            return tuple(Command((tools.python, *training), {**rank, **where}) for rank in ranks)


def arguments(asked: Compare, *, out: str, seconds: float) -> tuple[str, ...]:
    """The options of the training, the same for every way."""
    words = {
        "--out": out,
        "--steps": str(asked.steps),
        "--batch-size": str(asked.batch_size),
        "--backend": asked.backend,
        "--seconds": f"{seconds:.0f}",
        "--data-dir": asked.data_dir,
    }
    return tuple(word for name, value in words.items() if value is not None for word in (name, value))


def typed(way: Way, ranks: int) -> str:
    """What a user would type for a script of their own."""
    launcher = f"--nproc-per-node {ranks}"
    match way:
        case Way.SPAWN:
            return f"python train.py, which calls torch.multiprocessing.spawn(main, nprocs={ranks})"
        case Way.TORCHRUN:
            return f"torchrun {launcher} train.py"
        case Way.RUN:
            return f"python -m torch.distributed.run {launcher} train.py"
        case Way.LAUNCH:
            return f"python -m torch.distributed.launch {launcher} train.py"
        case Way.LAUNCH_USE_ENV:
            return f"python -m torch.distributed.launch --use-env {launcher} train.py"
        case Way.BY_HAND:
            return f"RANK=0 WORLD_SIZE={ranks} MASTER_ADDR=... MASTER_PORT=... python train.py, once for each rank"


def environment(env: Environ, own: Mapping[str, str], *, python: str, folder: str) -> dict[str, str]:
    """The user's environment for a command, without what an earlier launch left there; `own` wins over it.

    `folder` takes the temporary files of launchers.
    """
    kept = {name: value for name, value in env.items() if name not in _STALE}
    return {
        **kept,
        # A module in the user's current directory must not take the place of one of the standard library.
        "PYTHONSAFEPATH": "1",
        "PYTHON_EXEC": python,  # torchrun's ranks run under the Python that runs us, wherever torchrun comes from
        "TMPDIR": folder,
        **own,
    }
