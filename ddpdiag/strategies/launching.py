"""Start a training by each launcher, wait for its end, and leave no process and no file behind.

torchrun puts every rank into a separate session, so ending a process group is not enough. Instead a variable (the mark)
is set for each command. All its descendants inherit the mark, by which they are found and ended.
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

from ddpdiag.checks.known_errors import explained_text, known_error
from ddpdiag.codec import decode, encode
from ddpdiag.model.train import StrategyStatus
from ddpdiag.probes.host.programs import python_command, with_package_path
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.supervisor.processes import Log, Signals, describe_end, die_with_parent, signal_process
from ddpdiag.strategies.launchers import LauncherRow, LaunchMethod, RankTimes, Training

# Time limits for ending a training: after SIGTERM, in which torchrun ends its ranks, and after SIGKILL.
_GRACE_SECONDS, _KILL_SECONDS = 3.0, 2.0
END_SECONDS = _GRACE_SECONDS + _KILL_SECONDS
# The time that the other commands have to exit after one has failed, such as by an error of the process group.
_ECHO_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MARK_VARIABLE = "DDPDIAG_LAUNCHED"
# A line with an error. torch's hook for exceptions puts the prefix [rank0] before it.
_ERROR_LINE = re.compile(r"(?:\[rank\d+\]: )?((?:[\w.]*(Error|Exception|Interrupt): \S|.*: error: ).*)")
_MAX_REASON_CHARACTERS = 300

Processes = Sequence[subprocess.Popen[bytes]]
LOOPBACK = "127.0.0.1"
# Variables that an earlier job may have left in the shell. They are removed, and the launcher sets new ones.
_STALE_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Command(Struct, frozen=True):
    """One process to start: its command line, and the variables that its launch method adds to the environment."""

    arguments: tuple[str, ...]
    variables: dict[str, str] = {}


def find_torchrun() -> str:
    """The path of `torchrun`: in the folder of this Python, else on PATH, else only the name."""
    sibling = Path(sys.executable).with_name("torchrun")
    return str(sibling) if os.access(sibling, os.X_OK) else shutil.which("torchrun") or "torchrun"


def commands(
    method: LaunchMethod, torchrun: str, training: Training, *, port: int, out: str, seconds: float
) -> tuple[Command, ...]:
    """The commands that start a training: one command for each rank for BY_HAND, a single command for other methods.

    The ranks write their times into the folder `out`. `seconds` is the time-out of their process group.
    """
    program = ("ddpdiag.strategies.workloads.launched", out, f"{seconds:.0f}", encode(training).decode())
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    match method:
        case LaunchMethod.SPAWN:
            return (Command(tuple(python_command(*program, "--spawn")), address),)
        case LaunchMethod.BY_HAND:
            ranks = ({"RANK": str(rank), "WORLD_SIZE": str(training.ranks)} for rank in range(training.ranks))
            return tuple(Command(tuple(python_command(*program)), {**rank, **address}) for rank in ranks)
        case LaunchMethod.TORCHRUN:
            launcher = [torchrun]
        case LaunchMethod.LAUNCH_USE_ENV:
            launcher = python_command("torch.distributed.launch", "--use-env")
        case LaunchMethod.RUN | LaunchMethod.LAUNCH:
            launcher = python_command(method.value)
    return (Command((*launcher, "--nproc-per-node", str(training.ranks), "--master-port", str(port), "-m", *program)),)


def environment(env: Mapping[str, str], *, folder: str) -> dict[str, str]:
    """`env` without the variables of an earlier launch, and with `folder` for temporary files."""
    return {
        **{name: value for name, value in env.items() if name not in _STALE_VARIABLES},
        # A file in the current directory must not replace a module of the standard library.
        "PYTHONSAFEPATH": "1",
        # torchrun's ranks run under this Python, even if torchrun belongs to another one.
        "PYTHON_EXEC": sys.executable,
        "TMPDIR": folder,
    }


class LauncherComparison:
    """Starts a training by each launcher. `run` sets `rows` and `setting` (backend, device and version of torch)."""

    def __init__(self, training: Training, folder: str, signals: Signals, budget_seconds: float) -> None:
        self.rows: dict[LaunchMethod, LauncherRow] = {}
        self.setting = ""
        self._training, self._folder, self._signals = training, folder, signals
        self._torchrun = find_torchrun()
        self._end = time.monotonic() + budget_seconds

    def run(self, report_start: Callable[[LaunchMethod], None]) -> None:
        """Run a training by each method. TORCHRUN runs twice, because the first start reads torch from disk."""
        order = (LaunchMethod.TORCHRUN, *LaunchMethod)
        for index, method in enumerate(order):
            report_start(method)
            self._run_method(method, (self._end - time.monotonic()) / (len(order) - index))

    def _run_method(self, method: LaunchMethod, seconds: float) -> None:
        """Run one training and set its row. Do nothing if no time is left, or after a signal to stop."""
        seconds -= END_SECONDS
        if seconds <= 0 or self._signals.received is not None:
            return
        out = Path(tempfile.mkdtemp(prefix="ddpdiag-", dir=self._folder))
        port, training = free_port(LOOPBACK), self._training
        to_start = commands(method, self._torchrun, training, port=port, out=str(out), seconds=seconds)
        begin = time.monotonic()
        status, reason = self._run_commands(to_start, out, seconds)
        if self._signals.received is not None:  # this process ended the training, so the outcome is not known
            return
        rank_times = _read_rank_times(out)
        expected = {(rank, training.ranks) for rank in range(training.ranks)}
        if status is StrategyStatus.WORKS and {(times.rank, times.world_size) for times in rank_times} != expected:
            trained = ", ".join(f"{times.rank} of {times.world_size}" for times in rank_times) or "none"
            status = StrategyStatus.FAILS
            reason = f"there was no error, but the ranks that trained are {trained}; expected {training.ranks}"
        if status is not StrategyStatus.WORKS:
            self.rows[method] = LauncherRow(method=method, status=status, reason=explained_text(reason))
            return
        first = rank_times[0]
        self.setting = f"{first.backend}, {first.device}, torch {first.torch_version}"
        self.rows[method] = LauncherRow(
            method=method,
            status=status,
            threads=tuple(times.threads for times in rank_times),
            start_seconds=max(times.group_ready_at for times in rank_times) - begin,
            step_seconds=max(times.step_seconds for times in rank_times),
        )

    def _run_commands(self, to_start: Sequence[Command], out: Path, limit_seconds: float) -> tuple[StrategyStatus, str]:
        """Run the commands for at most `limit_seconds`, then end all processes. Returns the outcome and its reason."""
        env = environment(with_package_path(os.environ), folder=self._folder)
        log = Log()
        processes: list[subprocess.Popen[bytes]] = []
        in_time, reason = True, ""
        try:
            for command in to_start:
                # Ctrl-C must reach only this process, so the session is new. If it is killed, the kernel sends SIGTERM.
                process = subprocess.Popen(
                    command.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    env={**env, **command.variables, _MARK_VARIABLE: out.name},
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
                )
                processes.append(process)
            in_time = _wait(processes, time.monotonic() + limit_seconds, self._signals)
        except OSError as error:
            reason = f"it cannot be started: {error}"
        finally:
            output = log.tail(1 << 16)  # read before the processes are ended, which makes them print messages
            failed = next((process.returncode for process in processes if process.returncode), 0)
            surviving_pids = _end_all(processes, out.name)
        log.close()
        if surviving_pids:
            pids = ", ".join(map(str, surviving_pids))
            reason = f"processes {pids} survive SIGKILL: they are stuck in the kernel or a driver"
        error_text = first_error(output)
        if not in_time and not reason:
            last = f"; its last output: {error_text}" if error_text else ""
            return StrategyStatus.HANGS, f"it did not end within {limit_seconds:.3g} s, its share of --budget{last}"
        if reason or failed:
            return StrategyStatus.FAILS, reason or error_text or describe_end(failed)
        return StrategyStatus.WORKS, ""


def _wait(processes: Processes, end: float, signals: Signals) -> bool:
    """Wait until all have ended, or one failed _ECHO_SECONDS ago. Returns False if `end` or a signal comes first."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + _ECHO_SECONDS:
            return True
        if now > end or signals.received is not None:
            return False
        select.select([signals.wake_socket], [], [], min(0.5, max(0.0, end - now)))
        signals.drain()
    return True


def _end_all(processes: Processes, mark: str) -> list[int]:
    """End the commands with SIGTERM, then all processes with this mark with SIGKILL. Returns the pids that survive."""
    for process in processes:
        if process.poll() is None:
            signal_process(process.pid, signal.SIGTERM)
    end = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    end = time.monotonic() + _KILL_SECONDS
    while (surviving_pids := list(_marked_pids(mark))) and time.monotonic() < end:
        for pid in surviving_pids:
            signal_process(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        for process in processes:
            process.poll()
    return surviving_pids


def _marked_pids(mark: str) -> Iterator[int]:
    """Yield the pids of processes with this mark in their environment. A zombie shows no environment any more."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK_VARIABLE) == mark:
                yield process.pid


def first_error(output: str) -> str:
    """The text of a known error in the output, else the first line that looks like an error, else the last line."""
    if (known := known_error(output)) is not None:
        return known.quote[:_MAX_REASON_CHARACTERS]
    lines = [line.strip() for line in output.splitlines() if line.strip(" \t=-")]
    errors = (match.group(1) for line in lines if (match := _ERROR_LINE.match(line)))
    return next(errors, lines[-1] if lines else "")[:_MAX_REASON_CHARACTERS]


def _read_rank_times(out: Path) -> list[RankTimes]:
    """Read what the ranks have written into the folder `out`, in the order of ranks. A truncated file is ignored."""
    records: list[RankTimes] = []
    for path in out.glob("rank-*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            records.append(decode(path.read_bytes(), RankTimes))
    return sorted(records, key=lambda times: times.rank)
