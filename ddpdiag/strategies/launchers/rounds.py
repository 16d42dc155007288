"""Every way of starting a training, in turn, round after round, within one budget.

In turn, because what else happens on the host changes from minute to minute; more than one round, because the first one
reads torch from the disk, and the later ones from memory. What torchrun and torch.distributed.launch take is in
torch/distributed/run.py and launch.py.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from msgspec import Struct

from ddpdiag.model.train import Ended
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.supervisor.processes import Signals, with_home
from ddpdiag.strategies.launchers.model import Compare, LaunchMethod, Start
from ddpdiag.strategies.launchers.turn import END_SECONDS, Command, Turn, start

MODULE = "ddpdiag.strategies.launchers.training"
_LOOPBACK = "127.0.0.1"
_MODULES = {
    LaunchMethod.RUN: ("torch.distributed.run",),
    LaunchMethod.LAUNCH: ("torch.distributed.launch",),
    LaunchMethod.LAUNCH_USE_ENV: ("torch.distributed.launch", "--use-env"),
}
_LAUNCHER = "--nproc-per-node {ranks} train.py"
# What a user would type for a script of their own.
_TYPED = {
    LaunchMethod.TORCHRUN: f"torchrun {_LAUNCHER}",
    LaunchMethod.RUN: f"python -m torch.distributed.run {_LAUNCHER}",
    LaunchMethod.LAUNCH: f"python -m torch.distributed.launch {_LAUNCHER}",
    LaunchMethod.LAUNCH_USE_ENV: f"python -m torch.distributed.launch --use-env {_LAUNCHER}",
    LaunchMethod.SPAWN: "python train.py, which calls torch.multiprocessing.spawn(main, nprocs={ranks})",
    LaunchMethod.BY_HAND: (
        "RANK=0 WORLD_SIZE={ranks} MASTER_ADDR=... MASTER_PORT=... python train.py, once for each rank"
    ),
}
# Whoever starts a rank sets these anew: what an earlier job left in the shell must not decide.
_STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A turn that worked is repeated if so many times its seconds are left, and has not hung before it took that long.
_NOISE = 2.0


class Tools(Struct, frozen=True, kw_only=True):
    """What is installed: the Python that runs us, and its torch's `torchrun` (None: there is none)."""

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


# Command lines -------------------------------------------------------------------------------------------------------


def commands(
    method: LaunchMethod, tools: Tools, asked: Compare, *, port: int, out: str, seconds: float
) -> tuple[Command, ...] | None:
    """What to start, in this order; None if the tool is not there. All but "by hand" are one command."""
    training = ("-m", MODULE, *arguments(asked, out=out, seconds=seconds))
    count = str(asked.ranks)
    where = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port)}
    if method is LaunchMethod.SPAWN:
        return (Command((tools.python, *training, "--spawn", count), where),)
    if method is LaunchMethod.BY_HAND:
        ranks = ({"RANK": str(rank), "WORLD_SIZE": count} for rank in range(asked.ranks))
        return tuple(Command((tools.python, *training), {**rank, **where}) for rank in ranks)
    if method is LaunchMethod.TORCHRUN and tools.torchrun is None:
        return None
    head = (
        (tools.torchrun,)
        if method is LaunchMethod.TORCHRUN and tools.torchrun
        else (tools.python, "-m", *_MODULES[method])
    )
    return (Command((*head, "--nproc-per-node", count, "--master-port", str(port), *training)),)


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
    return _TYPED[method].format(ranks=ranks)


def environment(env: Mapping[str, str], own: Mapping[str, str], *, python: str, folder: str) -> dict[str, str]:
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


# Turns ---------------------------------------------------------------------------------------------------------------


class Rounds:
    """The turns of all methods, whose launchers write into `folder`.

    `starts` are those that were made, `controls` those of the experiment on threads.
    """

    def __init__(
        self, asked: Compare, folder: str, signals: Signals, tell: Callable[[LaunchMethod, int], None]
    ) -> None:
        self.asked = asked
        self.starts: list[Start] = []
        self.controls: list[Start] = []
        self._tools = installed()
        self._signals = signals
        self._tell = tell
        self._folder = folder
        self._end = time.monotonic() + asked.budget_seconds

    def run(self) -> None:
        """Let each have its turns. What fails is not repeated; what is left of the budget is not exceeded."""
        for index, method in enumerate(LaunchMethod):
            self._tell(method, 0)
            self._turn(method, self._left() / (len(LaunchMethod) - index))
        self._control(0)
        for number in range(1, self.asked.rounds):
            for method in LaunchMethod:
                self._repeat(method, number)
            self._control(number)

    def _control(self, number: int) -> None:
        """If ranks that no launcher started have other threads than torchrun's: again, with its OMP_NUM_THREADS."""
        launched, free = (
            self._good(LaunchMethod.TORCHRUN),
            self._good(LaunchMethod.SPAWN) or self._good(LaunchMethod.BY_HAND),
        )
        if free and launched and free[0].ranks[0].threads != launched[0].ranks[0].threads:
            self._repeat(free[0].method, number, threads=launched[0].ranks[0].threads)

    def _repeat(self, method: LaunchMethod, number: int, *, threads: int | None = None) -> None:
        """Another turn, if all before worked and there is time for it."""
        done = self._good(method)
        if len(done) < number:
            return
        longest = _NOISE * max(start.seconds for start in done) + END_SECONDS
        if longest < self._left():
            self._tell(method, number)
            usual = self.asked.budget_seconds / len(LaunchMethod)
            self._turn(method, min(self._left(), max(usual, longest)), threads=threads)

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _good(self, method: LaunchMethod) -> list[Start]:
        return [start for start in self.starts if start.method is method and start.ended is Ended.WORKS]

    def _turn(self, method: LaunchMethod, seconds: float, *, threads: int | None = None) -> None:
        """One training, with so many threads a rank; none if there is no time, or a signal told us to leave."""
        seconds -= END_SECONDS
        if seconds <= 0 or self._signals.told is not None:
            return
        starts = self.starts if threads is None else self.controls
        out = Path(tempfile.mkdtemp(prefix="ddpdiag-", dir=self._folder))
        found = commands(method, self._tools, self.asked, port=free_port(_LOOPBACK), out=str(out), seconds=seconds)
        if found is None:
            reason = f"there is no torchrun beside {self._tools.python} or on PATH; reinstall torch"
            starts.append(
                Start(method=method, begun_at=time.monotonic(), seconds=0.0, ended=Ended.FAILS, reason=reason)
            )
            return
        own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        environ = environment(with_home(os.environ), own, python=self._tools.python, folder=self._folder)
        turn = Turn(method=method, commands=found, environ=environ, out=out, ranks=self.asked.ranks, seconds=seconds)
        done = start(turn, self._signals)
        if self._signals.told is None:  # else we ended it ourselves, and know nothing of it
            starts.append(done)
