"""`ddpdiag watch`: start the command and watch it.

Signals are passed on. When the command has written nothing for --stall seconds (a silence), the ranks are looked at:
once, and again after twice, four times ... that time, so that a hang is not reported endlessly. Time in which this
process itself was stopped does not count.
"""

import math
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from ddpdiag.cli.edge import complain
from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.watch import WatchOptions
from ddpdiag.watch.child import ENDING, Child, leave_as
from ddpdiag.watch.evidence import NO_PY_SPY, find_py_spy, recorder_variables
from ddpdiag.watch.judge import judge
from ddpdiag.watch.look import Look
from ddpdiag.watch.observer import Observer
from ddpdiag.watch.output import CommandOutput, OutputMonitor, failure_text, open_output
from ddpdiag.watch.peers import Peers
from ddpdiag.watch.processes import LAUNCHERS
from ddpdiag.watch.report import Reporter

_POLL_SECONDS = 1.0
# If a turn of the loop takes longer than this, this process or the whole machine was stopped meanwhile.
_GAP_SECONDS = 4.0
_DRAIN_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.05
_UNOBSERVED = (
    "Standard output and error go where writes cannot be seen (/dev/null), and no --output names another file."
)
_LEAST_STALL = 1.0
# A rank that imports modules for longer than this hangs.
_LONGEST_START_SECONDS = 600.0


class Silence:
    """Decides when to look at the ranks while nothing is written, and counts these looks."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall = stall_seconds
        self.looks = 0
        self._next = stall_seconds

    def is_due(self, silent_seconds: float) -> bool:
        """Whether it is time for a look. Resets the count of looks if the silence is shorter than --stall."""
        if silent_seconds < self._stall:
            self.looks, self._next = 0, self._stall
            return False
        return silent_seconds >= self._next

    def looked(self) -> None:
        """Count a look. The next one is due after twice the time."""
        self.looks += 1
        self._next *= 2


class Watch:
    """Watches one command from its start to its end."""

    def __init__(self, program: str, how: WatchOptions, command: Child, output: CommandOutput) -> None:
        self._program = program
        self._how = how
        self._command = command
        self._output = output
        self._peers = Peers(os.environ, command.pid)
        self._reporter = Reporter(how)
        self._monitor = OutputMonitor(output.sinks)
        self._observer = Observer(lambda: [peer.command_pid for peer in self._peers.all()])
        self._silence = Silence(how.stall + output.step_seconds)
        self._since = time.monotonic()  # when there was any other progress than output
        self._turn = time.monotonic()
        self._before: Look | None = None  # the previous look at this silence
        self._refusals: set[str] = set()
        self._signalled = False  # the command received a signal that ends it
        self.bug: str | None = None  # a traceback; from then on the command runs unwatched
        self.killed: ExitCode | None = None

    def run(self) -> None:
        """Watch until the command has ended."""
        while not self._command.is_over():
            received = self._command.next_signal(_POLL_SECONDS)
            now = time.monotonic()
            if now - self._turn > _GAP_SECONDS:
                self._since = now
            self._turn = now
            if not self._command.is_over() and self.bug is None:
                try:
                    self._watch(requested=received is not None and received.signum == signal.SIGUSR1)
                except Exception:  # noqa: BLE001 - an edge: a bug in ddpdiag must not end a training
                    self.bug = traceback.format_exc()
            if received is not None and received.signum not in (signal.SIGUSR1, signal.SIGCHLD):
                self._pass_on(received.signum, shared=received.shared)
        # Pass on what the command has written, however slow its reader is; a signal ends that.
        relays, ended = self._output.relays.values(), time.monotonic()
        while any(relay.is_owing(_DRAIN_SECONDS, ended) for relay in relays):
            received = self._command.next_signal(_DRAIN_POLL_SECONDS)
            if received is not None and received.signum in ENDING:
                return

    def explain_failure(self) -> None:
        """Print why the command failed, if its output shows that; not after an ending signal, --kill or a bug."""
        status = self._command.status
        quiet = self._signalled or self.killed is not None or self.bug is not None
        if status and not quiet and (text := failure_text(self._output.sinks, status)):
            complain(text)

    def _pass_on(self, signum: int, *, shared: bool) -> None:
        self._signalled |= signum in ENDING
        refused = "" if shared else self._command.send(signum)
        if refused and refused not in self._refusals:
            self._refusals.add(refused)
            with self._monitor.ignoring():
                complain(refused)
        if signum == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # as SIGTSTP would have done, until SIGCONT is sent
        if signum in (signal.SIGTSTP, signal.SIGCONT):
            self._since = time.monotonic()

    def _watch(self, *, requested: bool) -> None:
        self._observer.refresh()
        asked = requested and self._peers.request_look()
        silent = time.monotonic() - max(self._monitor.last, self._since)
        is_due = self._silence.is_due(silent)
        if not self._silence.looks:
            self._before = None
        if asked or (is_due and self._peers.leads()):
            look = self._look(silent, asked=asked)
            if asked:
                self._report(look)
            else:
                self._stalled(look)

    def _stalled(self, look: Look) -> None:
        """Report a look at a silence, unless ranks still import modules or post collectives."""
        silent = look.silent_seconds
        if look.progress_age is not None and look.progress_age < self._how.stall:
            self._since = time.monotonic() - look.progress_age
        elif look.is_start and silent < _LONGEST_START_SECONDS:
            self._since = time.monotonic()
        # If the job continued during the look, the ranks were seen at different moments.
        if time.monotonic() - max(self._monitor.last, self._since) >= silent:
            self._silence.looked()
            self._report(look)
            if self._how.kill and self._silence.looks > 1 and look.proves_a_hang:
                self.killed = ExitCode.UNFIT if judge(look).ranks else ExitCode.UNKNOWN
                complain(f"--kill: nothing new for {silent:.0f} s; SIGTERM to {readable(self._program)}")
                self._observer.end_all()

    def _report(self, look: Look) -> None:
        with self._monitor.ignoring():
            self._reporter.report(look)
        self._turn = time.monotonic()  # the time of a look is no gap

    def _look(self, silent: float, *, asked: bool) -> Look:
        look = Look(
            host=readable(socket.gethostname()),
            unix_seconds=time.time(),
            silent_seconds=silent,
            stall_seconds=self._how.stall,
            command=Path(self._program).name,
            asked=asked,
            notes=() if self._output.sinks else (_UNOBSERVED,),
            recorder=self._how.flight_recorder,
        )
        look = self._observer.look(look)
        blocked = max((relay.blocked_seconds() for relay in self._output.relays.values()), default=0.0)
        before, self._before = self._before, look
        return structs.replace(look, blocked_seconds=blocked, unmoved=look.is_unmoved(before))


def run(command: Sequence[str], how: WatchOptions) -> int:
    """Run and watch the command. Returns its exit code, or 1 or 3 after --kill; or ends by its signal."""
    if not command[0]:
        raise UsageError("the command to watch is empty: expected a command after --, such as torchrun train.py")
    program = os.path.basename(command[0])
    if how.flight_recorder and program in LAUNCHERS:
        # NCCL ends a rank that cannot make its pipe in the folder of this host.
        raise UsageError(
            f"--flight-recorder: {program} starts ranks on other hosts, where its files do not exist; start "
            f"`ddpdiag watch` on each host: `{program} ddpdiag watch --flight-recorder -- COMMAND`"
        )
    if not math.isfinite(how.stall) or how.stall < _LEAST_STALL:
        raise UsageError(f"--stall {how.stall:g}: expected {_LEAST_STALL:g} s or more")
    output = open_output(how.output)
    folder = tempfile.mkdtemp(prefix="ddpdiag-watch-") if how.flight_recorder else None
    try:
        env = os.environ | (recorder_variables(folder) if folder is not None else {})
        child = Child(command, env, {number: relay.descriptor for number, relay in output.relays.items()})
        for relay in dict.fromkeys(output.relays.values()):
            relay.start()
        watching = Watch(command[0], how, child, output)
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
