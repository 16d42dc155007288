"""`ddpdiag watch`: start the command and watch it, or judge what an earlier watch saved.

Signals are passed on, and the ranks are looked at when the command has written nothing for too long: once for each
silence, and again after twice, four times ... the patience, so that a hang is not reported endlessly. Time in which
this process itself was stopped does not count.
"""

import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import show, terminal
from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.model import Finding
from ddpdiag.text import ranks_text
from ddpdiag.watch import WatchOptions, report
from ddpdiag.watch.bundle import Bundle, merged, read_bundle
from ddpdiag.watch.child import ENDING, Child, end_all, leave_as
from ddpdiag.watch.evidence import NO_PY_SPY, find_py_spy, recorder_variables, timed_out
from ddpdiag.watch.judge import LAST_TO_END, judge, notes
from ddpdiag.watch.look import Activity, Failure, Look, subject
from ddpdiag.watch.observer import Observer
from ddpdiag.watch.output import CommandOutput, OutputMonitor, TerminalSink, open_output, read_failure
from ddpdiag.watch.peers import Peers, identity, job_name
from ddpdiag.watch.processes import refuse_remote_launchers
from ddpdiag.watch.report import Reporter

_POLL_SECONDS = 1.0
# A turn of the loop that took so much longer than expected: this process, or the whole machine, was stopped.
_GAP_SECONDS = 4.0
# torchrun gives its ranks 30 s; a job that hangs will not use them.
GRACE_SECONDS = 10.0
_DRAIN_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.05
_REMOTE_LAUNCHER = (
    "--flight-recorder: {} below the command may start ranks on other hosts. NCCL ends a rank that cannot make its "
    "pipe, and the directory for it exists on this host only; start `ddpdiag watch` behind it, on each host."
)
_UNREAD = (
    "the command failed, and its output on a terminal cannot be read here. Save the output (2>&1 | tee FILE): then "
    "`ddpdiag explain FILE` names the known cause, and `ddpdiag watch` does so as well."
)
_UNOBSERVED = (
    "Standard output and error go where writes cannot be seen (/dev/null), and no --output names another file."
)
_LEAST_STALL = 1.0
# A rank that imports for longer hangs in it.
_LONGEST_START_SECONDS = 600.0
# torchrun ends the other ranks, in at most 30 s, before it ends itself; NCCL's watchdog first writes for some seconds.
_FAILING_SECONDS = 90.0
# None of these can validate or save a checkpoint.
_HALTED = frozenset({Activity.GONE, Activity.STOPPED, Activity.WAITING})


class Silence:
    """The time in which nothing is written, and the looks at it; `ended` is when the last one was over that had one."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall = stall_seconds
        self.number = 0
        self.looks = 0
        self.ended = -math.inf
        self._next = stall_seconds

    def is_due(self, silent_seconds: float) -> bool:
        """Whether it is time for a look. Whatever is written ends the silence."""
        if silent_seconds < self._stall:
            if self.looks:
                self.ended = time.monotonic()
            self.looks, self._next = 0, self._stall
            return False
        return silent_seconds >= self._next

    def looked(self) -> None:
        """Note that a look was taken: the next one is due after twice the time."""
        self.number += self.looks == 0
        self.looks += 1
        self._next *= 2


class Watch:
    """One command, from its start to its end; `recorders` is the folder of the flight recorder's files."""

    def __init__(
        self,
        program: str,
        how: WatchOptions,
        command: Child,
        output: CommandOutput,
        kept: Bundle | None,
        recorders: str | None,
    ) -> None:
        self._program = program
        self._recorders = recorders
        self._how = how
        self._command = command
        self._output = output
        self._peers = Peers(job_name(os.environ), identity(os.environ, kill=how.kill))
        self._reporter = Reporter(lambda look, finding, new: report.show(look, finding, new, kept, how), complain)
        self._monitor = OutputMonitor(output.sinks)
        self._observer = Observer([command.pid])
        self._silence = Silence(how.stall + output.step_seconds)
        self._since = time.monotonic()  # when there was any other progress than output
        self._turn = time.monotonic()
        self._timed_out = False  # a rank has written its recorder by itself
        self._before: Look | None = None
        self._looks: list[Look] = []  # at the last silence
        self._signalled = False  # the command received a signal that ends it
        self.killed: int | None = None
        self.bug: str | None = None  # from then on the command runs unwatched

    def run(self) -> None:
        """Watch until the command has ended."""
        while not self._command.is_over():
            signalled = self._command.next_signal(_POLL_SECONDS)
            now = time.monotonic()
            if now - self._turn > _GAP_SECONDS:
                self._since = now
            self._turn = now
            if signalled is not None:
                self._obey(signalled.signum, shared=signalled.shared)
            if not self._command.is_over() and self.bug is None:
                try:
                    self._watch()
                except Exception:  # noqa: BLE001 - an edge: a bug in ddpdiag must not end a training
                    self.bug = traceback.format_exc()
        # Pass on what the command has written, however slow its reader is; a signal ends that.
        relays, ended = self._output.relays.values(), time.monotonic()
        while any(relay.is_owing(_DRAIN_SECONDS, ended) for relay in relays):
            signalled = self._command.next_signal(_DRAIN_POLL_SECONDS)
            if signalled is not None and signalled.signum in ENDING:
                return

    def explain_failure(self) -> None:
        """Report why the command failed, if what it wrote shows that; not after a signal that ends it."""
        status = self._command.status
        if status is None or self._signalled or self.killed is not None or self.bug is not None:
            return
        if (failure := read_failure(self._output.sinks, status)) is not None:
            ended = failed_look(self._look(0.0, asked=False), failure, self._looks if self._is_silent() else ())
            self._reporter.report(ended, judge(ended))
        elif status and self._output.sinks and all(isinstance(sink, TerminalSink) for sink in self._output.sinks):
            self._say(_UNREAD)

    def _is_silent(self) -> bool:
        """Whether the command is silent, or was so shortly before it began to fail."""
        return self._silence.looks > 0 or time.monotonic() - self._silence.ended < _FAILING_SECONDS

    def _obey(self, signum: int, *, shared: bool) -> None:
        if signum == signal.SIGUSR1:
            self._peers.request_look()
            return
        if signum == signal.SIGCHLD:
            return
        self._signalled |= signum in ENDING
        if not shared:
            self._say(self._command.send(signum))
        if signum == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # as SIGTSTP would have done, until SIGCONT is sent
        if signum in (signal.SIGTSTP, signal.SIGCONT):
            self._since = time.monotonic()

    def _say(self, sentence: str) -> None:
        with self._monitor.ignoring():
            self._reporter.say_once(sentence)

    def _watch(self) -> None:
        self._observer.refresh()
        if self._how.flight_recorder and self._observer.remote_launcher:
            self._say(_REMOTE_LAUNCHER.format(self._observer.remote_launcher))
        last = max(self._monitor.last, self._since)
        news = self._peers.exchange(self._command.pid, time.monotonic() - last)
        if not news.leads:
            return
        self._observer.tops = [self._command.pid, *news.pids]
        self._since = max(self._since, time.monotonic() - news.silent_seconds)
        silent = time.monotonic() - max(last, self._since)
        if self._silence.is_due(silent):
            self._stalled(silent)
        elif not self._timed_out and self._recorders is not None and timed_out(self._recorders):
            self._timed_out = True  # torch ends the rank soon after that
            look = structs.replace(self._looked(silent, asked=False), timed_out=True)
            self._looks = [look]
            self._silence.ended = time.monotonic()
            self._report(look)
        elif news.asked:
            self._report(self._looked(silent, asked=True))

    def _stalled(self, silent: float) -> None:
        look = self._looked(silent, asked=False)
        if look.progress_age is not None and look.progress_age < self._how.stall:
            self._since = time.monotonic() - look.progress_age
        elif look.is_start and silent < _LONGEST_START_SECONDS:
            self._since = time.monotonic()
        # If the job continued during the look, the ranks were seen at different moments.
        if time.monotonic() - max(self._monitor.last, self._since) < silent:
            return
        finding = judge(look)
        why = self._why_not_kill(look) if self._how.kill else ""
        earlier = earlier_text(self._looks) if look.looks > 1 and not finding.ranks else ""
        look = structs.replace(look, notes=(*look.notes, *filter(None, (earlier, why))))
        self._looks = [*self._looks, look] if look.looks > 1 else [look]
        self._silence.looked()
        self._report(look, why)
        if self._how.kill and not why and finding.code != LAST_TO_END:
            self.killed = ExitCode.UNFIT if finding.ranks else ExitCode.UNKNOWN
            others = self._observer.tops[1:]
            self._say(kill_text(look, finding, [self._command.pid, *others]))
            self._say(end_all(self._command, others, self._observer.living, GRACE_SECONDS))

    def _why_not_kill(self, look: Look) -> str:
        """A sentence where the silence does not prove a hang; empty where it does."""
        if look.progress_age is None and self._output.files not in self._monitor.active:
            if not self._monitor.active:
                files = f", nor to {' '.join(map(readable, self._how.output))}" if self._how.output else ""
                return (
                    f"Not ended: the command has never written to its output{files}, so silence does not prove a hang."
                )
            if look.is_without_rank_0:
                return "Not ended: rank 0 runs on another host, and no --output or flight recorder shows progress here."
        return may_work_text(look)

    def _report(self, look: Look, why: str = "") -> None:
        with self._monitor.ignoring():
            self._reporter.report(look, judge(look), why)
        self._turn = time.monotonic()  # a look takes its time

    def _look(self, silent: float, *, asked: bool) -> Look:
        """A look, without what is seen of the ranks."""
        return Look(
            host=readable(socket.gethostname()),
            unix_seconds=time.time(),
            silent_seconds=silent,
            stall_seconds=self._how.stall,
            command=Path(self._program).name,
            asked=asked,
            number=self._silence.number + (self._silence.looks == 0),
            looks=self._silence.looks + 1,
            notes=() if self._output.sinks else (_UNOBSERVED,),
            recorder=self._how.flight_recorder,
        )

    def _looked(self, silent: float, *, asked: bool) -> Look:
        look = self._observer.look(self._look(silent, asked=asked))
        blocked = max((relay.blocked_seconds() for relay in self._output.relays.values()), default=0.0)
        before, self._before = self._before, look
        return structs.replace(look, blocked_seconds=blocked, unmoved=look.is_unmoved(before))


def failed_look(ended: Look, failure: Failure, looks: Sequence[Look]) -> Look:
    """The look that reports a failure, with the ranks of the last of the `looks` at the silence before it."""
    if not looks:
        return structs.replace(ended, failure=failure)
    look = looks[-1]
    age = max(0.0, ended.unix_seconds - look.unix_seconds)
    earlier = "" if judge(look).ranks else earlier_text(looks)
    return structs.replace(
        look,
        unix_seconds=ended.unix_seconds,
        silent_seconds=look.silent_seconds + age,
        failure=structs.replace(failure, look_seconds=age),
        notes=(*ended.notes, *([earlier] if earlier else ())),
    )


def earlier_text(looks: Sequence[Look]) -> str:
    """A sentence on the last of the looks at one silence that named ranks; empty where none did."""
    named = [(look, finding) for look in looks if (finding := judge(look)).ranks]
    if not named:
        return ""
    look, finding = named[-1]
    return f"The look after {look.silent_seconds:.0f} s named {ranks_text(finding.ranks)}: {finding.title}."


def may_work_text(look: Look) -> str:
    """A sentence where ranks may validate or save: --kill then waits for the second look; empty else."""
    ranks = [rank for rank, activity in look.activities.items() if activity not in _HALTED]
    if look.looks > 1 or not ranks or look.doing(Activity.GONE, Activity.STOPPED):
        return ""
    return (
        f"Not ended at this look: {ranks_text(ranks)} may validate or save a checkpoint. --kill ends the command after "
        f"{2 * look.silent_seconds:.0f} s without output. If a healthy job can be silent for so long, set --stall "
        "above its longest silence."
    )


def kill_text(look: Look, finding: Finding, pids: Sequence[int]) -> str:
    """The processes that --kill ends, by which signals, and why."""
    why = f"{subject(finding.ranks, 'is', 'are')} named above" if finding.ranks else "no rank is named"
    return (
        f"--kill: SIGTERM to {look.command} ({', '.join(f'pid {pid}' for pid in pids)}): nothing new for "
        f"{look.silent_seconds:.0f} s, and {why}. "
        f"SIGKILL follows after {GRACE_SECONDS:g} s to processes that still run."
    )


def run(command: Sequence[str], how: WatchOptions) -> int:
    """Start the command, watch it, and exit as it does."""
    if not command[0]:
        raise UsageError("the command to watch is empty: expected a command after --, such as torchrun train.py")
    if how.flight_recorder:
        refuse_remote_launchers(command)
    if not math.isfinite(how.stall) or how.stall < _LEAST_STALL:
        raise UsageError(f"--stall {how.stall:g}: expected {_LEAST_STALL:g} s or more")
    kept = None if how.bundle is None else Bundle(how.bundle)
    written = open_output(how.output)
    if how.kill and not written.sinks and not how.flight_recorder:
        raise UsageError(
            f"--kill: {_UNOBSERVED} Give --output FILE, or --flight-recorder: otherwise a healthy job would be killed"
        )
    folder = tempfile.mkdtemp(prefix="ddpdiag-watch-") if how.flight_recorder else None
    try:
        env = os.environ | (recorder_variables(folder) if folder is not None else {})
        child = Child(command, env, {number: relay.descriptor for number, relay in written.relays.items()})
        for relay in dict.fromkeys(written.relays.values()):
            relay.start()
        watching = Watch(command[0], how, child, written, kept, folder)
        if find_py_spy() is None:
            complain(f"reports will show no stacks: {NO_PY_SPY}")
        watching.run()
        watching.explain_failure()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if watching.bug is not None:
        complain("a bug in ddpdiag ended the watching, not the command; please report this text:\n" + watching.bug)
    if watching.killed is not None:
        return watching.killed
    return 0 if child.status is None else leave_as(child.status)


def read(paths: Sequence[str], how: WatchOptions) -> int:
    """Judge what --bundle saved, of all hosts that looked at the newest silence; 1 if a rank is named, else 3."""
    if not all(paths):
        raise UsageError("--read: the name of a file is empty")
    look = merged([look for path in paths for look in read_bundle(path)])
    finding = judge(look)
    width, color = terminal(sys.stdout, how.color)
    show(report.render(look, finding, notes(look), color=color, width=width, quiet=how.quiet), sys.stdout)
    return ExitCode.UNFIT if finding.ranks else ExitCode.UNKNOWN
