"""Start a training by each launcher, wait for it, and leave no process and no file behind.

torchrun puts every rank into a separate session, so ending a process group is not enough. All descendants of a command
inherit a mark in their environment; they are found and ended by that mark.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from ddpdiag.checks.known_errors import known_error
from ddpdiag.codec import decode, encode
from ddpdiag.model.train import Ended
from ddpdiag.probes.host.programs import python_command, with_home
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.supervisor.processes import Log, Signals, die_with_parent, how_it_ended, signal_process
from ddpdiag.strategies.launchers import HEADS, Compare, LaunchMethod, RankTimes, Start

# How long the end of a training may take: torchrun needs some of it to end its ranks.
_GRACE_SECONDS, _KILL_SECONDS = 3.0, 2.0
END_SECONDS = _GRACE_SECONDS + _KILL_SECONDS
# By hand no launcher ends the others when one has failed; ranks whose group reports it exit by then.
_ECHO_SECONDS = 5.0
_POLL_SECONDS = 0.05
# A training that worked is repeated if this many times its seconds are left.
_NOISE = 2.0
_MARK = "DDPDIAG_LAUNCHED"
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|Interrupt): \S|.*: error: |terminate called|Fatal Python error")
# torch's own hook for exceptions, once a group was open.
_PREFIX = re.compile(r"\[rank\d+\]: ?")
_LONGEST_REASON = 300

Processes = Sequence[subprocess.Popen[bytes]]


# Command lines -------------------------------------------------------------------------------------------------------


MODULE = "ddpdiag.strategies.workloads.launched"
LOOPBACK = "127.0.0.1"
# The launcher of a rank sets these again: what an earlier job left in the shell must not decide.
_STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Command(Struct, frozen=True):
    """One process to start: its arguments, and the variables that its launch method adds to the user's."""

    words: tuple[str, ...]
    variables: dict[str, str] = {}


def find_torchrun() -> str | None:
    """The `torchrun` beside this Python, else one on PATH."""
    beside = Path(sys.executable).with_name("torchrun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("torchrun")


def commands(
    method: LaunchMethod, torchrun: str | None, asked: Compare, *, port: int, out: str, seconds: float
) -> tuple[Command, ...] | None:
    """The commands to start, in this order; None without torchrun. All methods but "by hand" are one command."""
    training = [MODULE, out, f"{seconds:.0f}", encode(asked).decode()]
    # Apart from the others: a path need not be UTF-8.
    count = str(asked.ranks)
    where = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    if method is LaunchMethod.SPAWN:
        return (Command(tuple(python_command(*training, "--spawn")), where),)
    if method is LaunchMethod.BY_HAND:
        ranks = ({"RANK": str(rank), "WORLD_SIZE": count} for rank in range(asked.ranks))
        return tuple(Command(tuple(python_command(*training)), {**rank, **where}) for rank in ranks)
    program, *options = HEADS[method]
    if program == "torchrun" and torchrun is None:
        return None
    head = [torchrun] if program == "torchrun" else python_command(*options[1:])
    return (Command((*head, "--nproc-per-node", count, "--master-port", str(port), "-m", *training)),)


def environment(env: Mapping[str, str], *, folder: str) -> dict[str, str]:
    """The user's environment without variables of an earlier launch; `folder` takes temporary files of launchers."""
    return {
        **{name: value for name, value in env.items() if name not in _STALE},
        # A module in the user's current directory must not take the place of one of the standard library.
        "PYTHONSAFEPATH": "1",
        # torchrun's ranks run under the Python that runs this, wherever torchrun is from.
        "PYTHON_EXEC": sys.executable,
        "TMPDIR": folder,
    }


# Rounds --------------------------------------------------------------------------------------------------------------


class Rounds:
    """All trainings of a comparison, in `starts`; the launchers write into `folder`."""

    def __init__(self, asked: Compare, folder: str, signals: Signals, tell: Callable[[LaunchMethod], None]) -> None:
        self.asked = asked
        self.starts: list[Start] = []
        self._torchrun = find_torchrun()
        self._signals = signals
        self._tell = tell
        self._folder = folder
        self._end = time.monotonic() + asked.budget_seconds

    def run(self) -> None:
        """Start a training by each method, and once more by those that work, as far as the budget allows."""
        usual = self.asked.budget_seconds / len(LaunchMethod)
        for index, method in enumerate(LaunchMethod):
            self._tell(method)
            self._start(method, self._left() / (len(LaunchMethod) - index))
        for first in [start for start in self.starts if start.ended is Ended.WORKS]:
            longest = _NOISE * first.seconds + END_SECONDS
            if longest < self._left():
                self._tell(first.method)
                self._start(first.method, min(self._left(), max(usual, longest)))

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _start(self, method: LaunchMethod, seconds: float) -> None:
        """One training; none if there is no time, or a signal asked to stop."""
        seconds -= END_SECONDS
        if seconds <= 0 or self._signals.received is not None:
            return
        out = Path(tempfile.mkdtemp(prefix="ddpdiag-", dir=self._folder))
        to_run = commands(method, self._torchrun, self.asked, port=free_port(LOOPBACK), out=str(out), seconds=seconds)
        if to_run is None:
            start = Start(
                method=method,
                begun_at=time.monotonic(),
                seconds=0.0,
                ended=Ended.FAILS,
                reason=f"there is no torchrun beside {sys.executable} or on PATH; reinstall torch",
            )
        else:
            start = self._run(method, to_run, out, seconds)
        if self._signals.received is None:  # else this process ended it, and the outcome is not known
            self.starts.append(start)

    def _run(self, method: LaunchMethod, to_run: Sequence[Command], out: Path, limit: float) -> Start:
        """Run the commands for at most `limit` seconds, or until a signal; the ranks write into `out`."""
        environ = environment(with_home(os.environ), folder=self._folder)
        log = Log()
        processes: list[subprocess.Popen[bytes]] = []
        begun_at = time.monotonic()
        in_time, reason = True, ""
        try:
            for command in to_run:
                # Its own session: Ctrl-C is handled here. If this process is killed, the command is asked to stop.
                process = subprocess.Popen(
                    command.words,
                    stdin=subprocess.DEVNULL,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    env={**environ, **command.variables, _MARK: out.name},
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
                )
                processes.append(process)
            in_time = _wait(processes, begun_at + limit, self._signals)
        except OSError as error:
            reason = f"it cannot be started: {error}"
        finally:
            seconds = time.monotonic() - begun_at
            output = log.tail(1 << 16)  # before the processes are ended, and print messages about that
            left = _end_all(processes, out.name)
        log.close()
        ranks = tuple(sorted(_read_all(out), key=lambda times: times.rank))
        ended = Ended.FAILS
        if left:
            reason = f"processes {', '.join(map(str, left))} survive SIGKILL: they are stuck in the kernel or a driver"
        elif not reason:
            failed = next((process.returncode for process in processes if process.returncode), 0)
            ended, reason = self._result(ranks, first_error(output), failed, None if in_time else limit)
        return Start(method=method, begun_at=begun_at, seconds=seconds, ended=ended, reason=reason, ranks=ranks)

    def _result(self, ranks: Sequence[RankTimes], error: str, failed: int, late: float | None) -> tuple[Ended, str]:
        """The outcome, and the reason where not all of it worked.

        `failed` is the first exit code that is not 0, `late` the limit in seconds that the training exceeded.
        """
        if late is None and failed:
            return Ended.FAILS, error or how_it_ended(failed)
        if late is not None:
            last = f"; its last output: {error}" if error else ""
            return Ended.HANGS, f"it did not end within {late:.3g} s, its share of --budget{last}"
        wanted = self.asked.ranks
        if [times.rank for times in ranks] != [*range(wanted)] or any(times.world_size != wanted for times in ranks):
            trained = ", ".join(f"{times.rank} of {times.world_size}" for times in ranks) or "none"
            return (
                Ended.FAILS,
                f"there was no error, but the ranks that trained are {trained}; expected {wanted}",
            )
        return Ended.WORKS, ""


def _wait(processes: Processes, end: float, signals: Signals) -> bool:
    """Whether all ended before `end`; ranks whose group reports that another one failed are not waited for."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + _ECHO_SECONDS:
            return True
        if now > end or signals.received is not None:
            return False
        select.select([signals.woken], [], [], min(0.5, max(0.0, end - now)))
        signals.drain()
    return True


def _end_all(processes: Processes, mark: str) -> list[int]:
    """End the commands with SIGTERM, then their descendants with SIGKILL; the pids that cannot be ended."""
    for process in processes:
        if process.poll() is None:
            signal_process(process.pid, signal.SIGTERM)
    end = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    end = time.monotonic() + _KILL_SECONDS
    while (left := list(_marked(mark))) and time.monotonic() < end:
        for pid in left:
            signal_process(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        for process in processes:
            process.poll()
    return left


def _marked(mark: str) -> Iterator[int]:
    """The living processes that carry the mark; a zombie has no environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark:
                yield process.pid


def first_error(output: str) -> str:
    """A known cause in the output, else its first line that looks like an error, else its last one."""
    if (known := known_error(output)) is not None:
        return known.quote[:_LONGEST_REASON]
    lines = [_PREFIX.sub("", line.strip()) for line in output.splitlines() if line.strip(" \t=-")]
    found = next((line for line in lines if _ERROR_LINE.match(line)), lines[-1] if lines else "")
    return found[:_LONGEST_REASON]


def _read_all(out: Path) -> list[RankTimes]:
    """The records that the ranks wrote; a truncated file is ignored."""
    records: list[RankTimes] = []
    for path in out.glob("rank-*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            records.append(decode(path.read_bytes(), RankTimes))
    return records
