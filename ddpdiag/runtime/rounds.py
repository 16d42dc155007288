"""Every way of starting a training, in turn, round after round, within one budget.

In turn, because what else happens on the host changes from minute to minute; more than one round, because the first one
reads torch from the disk, and the later ones from memory.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ddpdiag.model.launching import Compare, Start, Way
from ddpdiag.model.train import Ended
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.children import with_home
from ddpdiag.runtime.signals import Signals
from ddpdiag.runtime.starting import GRACE_SECONDS, KILL_SECONDS, Turn, start
from ddpdiag.runtime.ways import LOOPBACK, Tools, commands, environment

# What the end of a training may cost beyond its share.
_END_SECONDS = GRACE_SECONDS + KILL_SECONDS
# A turn that worked is repeated if so many times its seconds are left, and has not hung before it took that long.
_NOISE = 2.0

Told = Callable[[Way, int], None]


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


class Rounds:
    """The turns of all ways. `starts` are those that were made, `controls` those of the experiment on threads."""

    def __init__(self, asked: Compare, tools: Tools, signals: Signals, told: Told) -> None:
        self.asked = asked
        self.starts: list[Start] = []
        self.controls: list[Start] = []
        self._tools = tools
        self._signals = signals
        self._told = told
        self._end = time.monotonic() + asked.budget_seconds

    def run(self, ways: Sequence[Way] = tuple(Way)) -> None:
        """Let each have its turns. What fails is not repeated; what is left of the budget is not exceeded."""
        with _private_folder() as folder:
            for index, way in enumerate(ways):
                self._told(way, 0)
                self._turn(self.starts, way, folder, self._left() / (len(ways) - index))
            self._control(folder, 0)
            for number in range(1, self.asked.rounds):
                for way in ways:
                    self._repeat(self.starts, way, folder, number)
                self._control(folder, number)

    def _repeat(
        self, into: list[Start], way: Way, folder: Path, number: int, variables: dict[str, str] | None = None
    ) -> None:
        """Another turn, if all before worked and there is time for it."""
        done = self._good(way)
        if len(done) < number:
            return
        longest = _NOISE * max(start.seconds for start in done) + _END_SECONDS
        if longest < self._left():
            self._told(way, number)
            usual = self.asked.budget_seconds / len(Way)
            self._turn(into, way, folder, min(self._left(), max(usual, longest)), variables)

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _turn(
        self, into: list[Start], way: Way, folder: Path, seconds: float, variables: dict[str, str] | None = None
    ) -> None:
        """One training; none if there is no time, or a signal told us to leave."""
        seconds -= _END_SECONDS
        if seconds <= 0 or self._signals.told is not None:
            return
        out = Path(tempfile.mkdtemp(prefix="ddpdiag-", dir=folder))
        found = commands(way, self._tools, self.asked, port=free_port(LOOPBACK), out=str(out), seconds=seconds)
        if found is None:
            reason = f"there is no torchrun beside {self._tools.python} or on PATH; reinstall torch"
            into.append(Start(way=way, begun_at=time.monotonic(), seconds=0.0, ended=Ended.FAILS, reason=reason))
            return
        environ = environment(with_home(os.environ), variables or {}, python=self._tools.python, folder=str(folder))
        turn = Turn(way=way, commands=found, environ=environ, out=out, ranks=self.asked.ranks, seconds=seconds)
        done = start(turn, self._signals)
        if self._signals.told is None:  # else we ended it ourselves, and know nothing of it
            into.append(done)

    def _control(self, folder: Path, number: int) -> None:
        """If ranks that no launcher started have other threads than torchrun's: again, with its OMP_NUM_THREADS."""
        launched, spawned, hand = (self._good(way) for way in (Way.TORCHRUN, Way.SPAWN, Way.BY_HAND))
        free = spawned or hand
        if free and launched and free[0].ranks[0].threads != launched[0].ranks[0].threads:
            variables = {"OMP_NUM_THREADS": str(launched[0].ranks[0].threads)}
            self._repeat(self.controls, free[0].way, folder, number, variables)

    def _good(self, way: Way) -> list[Start]:
        return [start for start in self.starts if start.way is way and start.ended is Ended.WORKS]


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that only this user may read, and that is gone afterwards with all that launchers left in it."""
    folder = Path(tempfile.mkdtemp(prefix="ddpdiag-launchers-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
