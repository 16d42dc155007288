"""`ddpdiag watch --pid 4711`: look at a job that runs already, once or every few seconds.

The output of such a job cannot be seen, and one look cannot distinguish a hang from a moment of a healthy job. So looks
are compared. If a rank has left the collective in which it waited, or all ranks are elsewhere in the code, the job
makes progress. If all ranks but the named ones are where they were, the finding of the look holds. If neither is known
after _MAX_LOOKS, the report says so and names no rank.
"""

import os
import select
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import show
from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.probes.host.environment import is_pseudo_step
from ddpdiag.probes.host.kernel import PROC, environ, names_in
from ddpdiag.probes.host.programs import duration_text
from ddpdiag.text import begun, count, ranks_text
from ddpdiag.watch import WatchArgs
from ddpdiag.watch.ends import End, EndOrder
from ddpdiag.watch.evidence import NO_PY_SPY, find_py_spy
from ddpdiag.watch.judge import judge
from ddpdiag.watch.look import Activity, Look, RankState, subject
from ddpdiag.watch.observer import Observer
from ddpdiag.watch.output import end_text
from ddpdiag.watch.peers import job_name
from ddpdiag.watch.processes import (
    LAUNCHERS,
    RANK_VARIABLES,
    KnownProcesses,
    descendants,
    find_ranks,
    read_process,
)
from ddpdiag.watch.report import Reporter

# A rank that waits is believed to hang after so long. A report is promised 5 s after the start.
_PAUSE_SECONDS = 1.0
# What the end of a rank writes to the pipe of signals, which is no signal's number.
_ENDED = b"\0"
_MAX_LOOKS = 5
# A rank that has ended or is stopped does not continue by itself, so one look is enough.
_FINAL = (Activity.ENDED, Activity.STOPPED)
# From this number of looks on, and this share of them, a rank for which others wait is called a straggler.
_MIN_STRAGGLER_LOOKS, _STRAGGLER_SHARE = 5, 0.6
_MAX_TALLY_LINES, _MAX_CHOICES = 8, 16
# Ranks that end because another one ended do so within this time (Python's shutdown). torchrun restarts ranks later.
_ECHO_SECONDS, _RESTART_SECONDS = 5.0, 15.0


def run(options: WatchArgs) -> int:
    """Look at the job and report: once, or with --every until the job ends. Returns the exit code."""
    attachment = Attachment(options, job_pids(options.pid) if options.pid else local_pids(os.environ))
    if find_py_spy() is None:
        complain(f"reports will show no stacks: {NO_PY_SPY}")
    if options.every is not None:
        return attachment.watch(options.every)
    look = attachment.look()
    attachment.report(look)
    return exit_code(look)


def named_ranks(look: Look) -> tuple[int, ...]:
    """The ranks that the findings of a look name."""
    return tuple(rank for finding in judge(look) for rank in finding.ranks)


def exit_code(look: Look) -> ExitCode:
    """1 if a rank is named, 0 if the job makes progress, else 3."""
    if named_ranks(look):
        return ExitCode.UNFIT
    return ExitCode.FIT if look.progress else ExitCode.UNKNOWN


# The processes of the job -------------------------------------------------------------------------------------------


def job_pids(pids: Sequence[int], root: Path = PROC) -> list[int]:
    """`pids` and, for each that is a rank, the other ranks of its job on this host.

    UsageError if a pid has no rank at or below it, or has ranks of several jobs.
    """
    known = KnownProcesses(root)
    members: set[int] = set()
    for pid in dict.fromkeys(pids):
        process = read_process(pid, root)
        if process is None:
            raise UsageError(f"--pid {pid}: no such process on this host; expected the pid of a launcher or rank")
        if process.state in "ZX":
            raise UsageError(f"--pid {pid}: the process ({readable(process.name)}) has ended; only its parent has not")
        processes = known.complete(descendants([pid], root))
        ranks = find_ranks(processes)
        if ranks.are_guessed and not any(each.is_python for each in ranks.by_rank.values()):
            hint = "; it starts ranks elsewhere: run this command on their hosts" if process.name in LAUNCHERS else ""
            raise UsageError(f"--pid {pid}: {readable(process.name)} has no rank at or below it (RANK, Python){hint}")
        jobs = _jobs((each.pid for each in processes), root)
        _check_one_job(f"--pid {pid}", jobs)
        members |= {pid}
        if (name := jobs.get(pid)) is not None:
            members |= {other for other, job in _jobs(_all_pids(root), root).items() if job == name}
    return sorted(members)


def local_pids(env: Mapping[str, str], root: Path = PROC, *, is_required: bool = True) -> list[int]:
    """The topmost processes of the ranks on this host: inside a job of Slurm of that, and none of this launch.

    UsageError if they are of several jobs or, if `is_required`, there are none.
    """
    slurm_job, own_name = env.get("SLURM_JOB_ID"), job_name(env)
    jobs = _jobs(_all_pids(root), root, slurm_job)
    jobs = {pid: name for pid, name in jobs.items() if name is None or name != own_name}
    if not jobs and is_required:
        raise UsageError("--attach: no rank of a job was found on this host; expected RANK or a launcher's variable")
    if slurm_job is None:
        _check_one_job("--attach", jobs)
    return sorted(jobs)


def _all_pids(root: Path) -> list[int]:
    return [int(name) for name in names_in(root) or () if name.isdigit()]


def _jobs(pids: Iterable[int], root: Path, slurm_job: str | None = None) -> dict[int, str | None]:
    """The topmost processes that have variables of a rank, each with the name of its job. `slurm_job`: only of that."""
    names: dict[int, str | None] = {}
    for pid in pids:
        variables = environ(pid, root) or {}
        job = variables.get("SLURM_JOB_ID")
        # A batch script of Slurm and the srun in it have SLURM_PROCID 0, and are no ranks.
        is_outside = job is not None and ("SLURM_STEP_ID" not in variables or is_pseudo_step(variables))
        is_rank = "RANK" in variables or (variables.keys() & RANK_VARIABLES and not is_outside)
        if is_rank and slurm_job in (None, job):
            names[pid] = job_name(variables)
    return {pid: name for pid, name in names.items() if (each := read_process(pid, root)) and each.parent not in names}


def _check_one_job(option: str, jobs: Mapping[int, str | None]) -> None:
    first_pids = {name: pid for pid, name in sorted(jobs.items(), reverse=True)}
    if len(first_pids) > 1:
        choices = ", ".join(map(str, sorted(first_pids.values())[:_MAX_CHOICES]))
        raise UsageError(f"{option}: {len(first_pids)} jobs run here; choose one: --pid with one of {choices}")


# The comparison of looks --------------------------------------------------------------------------------------------


def compare(before: Look | None, now: Look) -> Look:
    """`now` with what a comparison with an earlier look shows: progress, a standstill, or neither."""
    if before is None:
        return structs.replace(now, is_unsettled=not now.ranks_doing(*_FINAL))
    progress = progress_text(before, now)
    named = named_ranks(now)
    # If all ranks are named, only those with a stack show whether they are where they were.
    others = [state for state in now.ranks if state.rank not in named] or [s for s in now.ranks if s.stack]
    is_still_there = bool(others) and all(is_still(before.by_rank.get(state.rank), state) for state in others)
    is_settled = now.ranks_doing(*_FINAL) or is_still_there
    return structs.replace(
        now,
        progress=progress,
        is_unsettled=not is_settled and not progress,
        all_unmoved=now.is_unmoved(before),
        pitfalls=() if progress else now.pitfalls,
    )


def is_still(before: RankState | None, now: RankState) -> bool:
    """Whether a rank is where it was, in the same process and stack, without having woken up."""
    if before is None or before.pid != now.pid or _has_other_stack(before, now):
        return False
    return before.switches == now.switches or _may_poll(now)


def _may_poll(state: RankState) -> bool:
    """Whether a rank may wake up again and again in one wait: for a kernel of a GPU, or for a store, while ranks join.

    gloo's collectives sleep until they end. torch's functions that wait for a store have names such as
    _create_c10d_store and _store_based_barrier.
    """
    if state.activity is Activity.WAITING:
        return state.call.startswith("_") and state.call != "_engine_run_backward"
    return state.activity is Activity.MAY_WAIT


def progress_text(before: Look, now: Look) -> str:
    """A sentence on what shows that the job made progress between two looks; empty if nothing does."""
    if now.ranks_doing(Activity.ENDED, Activity.STOPPED, Activity.STUCK):
        return ""
    if {state.rank: state.pid for state in before.ranks} != {state.rank: state.pid for state in now.ranks}:
        return ""  # ranks were started meanwhile
    moved = [state.rank for state in now.ranks if not is_still(before.by_rank[state.rank], state)]
    woken = [rank for rank in before.ranks_doing(Activity.WAITING) if rank in moved]
    within = f"within {now.unix_seconds - before.unix_seconds:.1f} s"
    if woken:
        return f"{begun(subject(woken, 'has', 'have'))} left {before.calls_text(woken)} {within}."
    if not moved or len(moved) < len(now.ranks):
        return ""
    if all(_has_other_stack(before.by_rank[state.rank], state) for state in now.ranks):
        return f"Every rank has moved to other code {within}."
    writing = [state.rank for state in now.ranks if _has_written(before.by_rank[state.rank], state)]
    if not writing:
        return ""
    return f"{begun(subject(writing, 'has', 'have'))} written output, and every rank was active {within}."


def _has_other_stack(before: RankState, now: RankState) -> bool:
    """Whether both stacks are known, and differ."""
    return bool(before.stack and now.stack) and before.stack != now.stack


def _has_written(before: RankState, now: RankState) -> bool:
    return None not in (before.written_bytes, now.written_bytes) and before.written_bytes != now.written_bytes


class Tally:
    """Counts for which ranks others waited, over all looks."""

    def __init__(self) -> None:
        self.looks = self.progress_looks = 0
        self._named: Counter[int] = Counter()
        self._waiting: defaultdict[int, set[int]] = defaultdict(set)
        self._start = time.monotonic()

    def add(self, look: Look) -> None:
        """Count a look, with the ranks that it would name if the job made no progress.

        If more ranks are named than wait, the others have only reached the collective a moment earlier.
        """
        self.looks += 1
        self.progress_looks += bool(look.progress)
        named = named_ranks(structs.replace(look, progress="", is_unsettled=False))
        waiting = set(look.ranks_doing(Activity.WAITING)) - {*named}
        for rank in named if not waiting or len(named) <= len(waiting) else ():
            self._named[rank] += 1
            self._waiting[rank] |= waiting

    def lines(self) -> Iterator[str]:
        """Yield the lines of the tally: all looks, then the ranks for which others waited, most looks first."""
        duration = duration_text(time.monotonic() - self._start)
        yield f"ddpdiag watch: {count(self.looks, 'look')} in {duration}; progress in {self.progress_looks}"
        for rank, looks in self._named.most_common(_MAX_TALLY_LINES):
            waiting = sorted(self._waiting[rank])
            text = f"{ranks_text(waiting)} waited for rank {rank}" if waiting else f"rank {rank} was named"
            is_straggler = self.looks >= _MIN_STRAGGLER_LOOKS and looks >= _STRAGGLER_SHARE * self.looks
            is_straggler &= self.progress_looks >= _STRAGGLER_SHARE * self.looks
            note = ": a straggler, because the job makes progress" if is_straggler else ""
            yield f"  {text} in {looks} of {self.looks} looks{note}"


# The watch ----------------------------------------------------------------------------------------------------------


class Events:
    """Waits for signals and for the ends of ranks."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.signum = signal.SIGINT
        self.order = EndOrder(lambda: os.write(self._writer, _ENDED))

    def handle_signals(self) -> None:
        """Handle SIGUSR1 as a request, and SIGTERM and SIGHUP as SIGINT: by KeyboardInterrupt."""
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._interrupt)
        signal.signal(signal.SIGUSR1, lambda _signum, _frame: None)

    def _interrupt(self, signum: int, _frame: object) -> None:
        self.signum = signal.Signals(signum)
        raise KeyboardInterrupt

    def wait(self, seconds: float) -> bool:
        """Wait for the next event, at most `seconds`. Whether a signal requested a look."""
        readable_now, _, _ = select.select([self._reader], [], [], max(0.0, seconds))
        return bool(readable_now and os.read(self._reader, 64).strip(_ENDED))

    @property
    def later_ends(self) -> frozenset[int]:
        """The ranks that ended after the first one."""
        return frozenset([*self.order.ends][1:])

    def exit_code(self, code: ExitCode) -> ExitCode:
        """The exit code after the end of the job: by the first rank that ended, and `code` if its own is unknown."""
        first = next(iter(self.order.ends.values())).code
        return code if first is None else ExitCode.UNFIT if first else ExitCode.FIT


def ends_text(ends: Mapping[int, End]) -> Iterator[str]:
    """Yield a line on the rank that ended first, by which signal or code, and on the others; nothing if none has."""
    if not ends:
        return
    (rank, first), *others = ends.items()
    how = f" ({end_text(first.code)})" if first.code is not None else ""
    *_, (_, last) = ends.items()
    then = f"; {count(len(others), 'other rank')} within {last.at - first.at:.1f} s after it" if others else ""
    yield f"  rank {rank} ended first{how}{then}"


class Attachment:
    """Looks at the processes `pids` and all below them, which this process did not start."""

    def __init__(self, options: WatchArgs, pids: Sequence[int]) -> None:
        self._options = options
        self._pids = pids
        self._observer = Observer(lambda: pids, all_started=True)
        self._reporter = Reporter(options, stream=sys.stdout)
        self._events = Events()
        self._previous: Look | None = None
        self._shown: object = None

    def look(self) -> Look:
        """Look once or, until an earlier look allows a comparison, until it is known whether the job makes progress."""
        is_first = self._previous is None
        look = self._look_once()
        for _ in range(_MAX_LOOKS - 1 if is_first else 0):
            if not look.is_unsettled:
                break
            time.sleep(_PAUSE_SECONDS)
            look = self._look_once()
        return look

    def _look_once(self) -> Look:
        self._previous = compare(self._previous, self.observe())
        return self._previous

    def observe(self) -> Look:
        """Read the state of all ranks, without a comparison."""
        process = read_process(self._pids[0]) if self._pids else None
        look = Look(
            host=readable(socket.gethostname()),
            unix_seconds=time.time(),
            silent_seconds=0.0,
            stall_seconds=self._options.stall,
            command=process.name if process is not None else "",
            is_requested=True,
        )
        look = self._observer.observe(look)
        # Ranks end because the first one ended, and are no news.
        states = tuple(state for state in look.ranks if state.rank not in self._events.later_ends)
        return structs.replace(look, ranks=states)

    def report(self, look: Look) -> None:
        """Show a look."""
        if self._shown is not None:
            _print([""])
        self._reporter.report(look)
        self._shown = _essence(look)

    def watch(self, every_seconds: float) -> int:
        """Look until the job ends or a signal ends this process. Show the looks whose finding is new, and a tally."""
        self._events.handle_signals()
        complain(f"process {os.getpid()} looks every {every_seconds:g} s; `kill -USR1 {os.getpid()}` shows the tally")
        events, tally = self._events, Tally()
        code, is_requested = ExitCode.UNKNOWN, False
        try:
            while True:
                look = self.look()
                events.order.follow(self._observer.ranks)
                tally.add(look)
                code = exit_code(look)
                if is_requested or _essence(look) != self._shown:
                    self.report(look)
                if is_requested:
                    _print(tally.lines())
                if events.order.are_missing and len(look.ranks_doing(Activity.ENDED)) == len(look.ranks):
                    break
                is_requested = self._wait(events, every_seconds)
                if events.order.all_ended:
                    code = events.exit_code(code)
                    break
        except KeyboardInterrupt:
            code = ExitCode.of_signal(events.signum)
        _print((*tally.lines(), *ends_text(events.order.ends)))
        return code

    def _wait(self, events: Events, seconds: float) -> bool:
        """Wait until the next look is due, after `seconds` or when no more ranks end. Whether a signal requests it."""
        end, ended = time.monotonic() + seconds, len(events.order.ends)
        while not events.order.all_ended and (left := end - time.monotonic()) > 0:
            if events.wait(left):
                return True
            if len(events.order.ends) > ended:
                end, ended = time.monotonic() + _ECHO_SECONDS, len(events.order.ends)
        restart_end = time.monotonic() + _RESTART_SECONDS
        while events.order.all_ended and time.monotonic() < restart_end and any(map(_is_launcher, self._pids)):
            events.wait(_PAUSE_SECONDS)
            self._observer.refresh()
            events.order.follow(self._observer.ranks)
        return False


def _is_launcher(pid: int) -> bool:
    """Whether this process, which is no rank, still runs, and so may start the ranks anew."""
    process = read_process(pid)
    return process is not None and process.state not in "ZX"


def _essence(look: Look) -> object:
    """The codes and ranks of the findings, which are new if this differs."""
    return tuple((finding.code, finding.ranks) for finding in judge(look))


def _print(lines: Sequence[str] | Iterator[str]) -> None:
    show("".join(f"{line}\n" for line in lines), sys.stdout)
