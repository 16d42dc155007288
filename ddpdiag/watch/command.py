"""`ddpdiag watch`: start the command and watch it.

When the command has written nothing for --stall seconds (a silence), the state of all ranks is read and reported (a
look). The next looks follow after twice, four times ... that time, so that a hang is not reported endlessly. Time in
which this process itself was stopped does not count. Signals are passed on to the command.
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
from ddpdiag.watch import WatchArgs
from ddpdiag.watch.child import ENDING_SIGNALS, Child, exit_like
from ddpdiag.watch.ends import EndOrder
from ddpdiag.watch.evidence import NO_PY_SPY, find_py_spy, recorder_variables
from ddpdiag.watch.judge import judge
from ddpdiag.watch.look import Look
from ddpdiag.watch.observer import Observer
from ddpdiag.watch.output import CommandOutput, OutputMonitor, RankFileSink, failure_text, open_output
from ddpdiag.watch.peers import Peers
from ddpdiag.watch.processes import LAUNCHERS, LOCAL_RANK_VARIABLES
from ddpdiag.watch.report import Reporter

_POLL_SECONDS = 1.0
# If a turn of the loop takes longer than this, this process or the machine was stopped meanwhile.
_GAP_SECONDS = 4.0
# After the command has ended, its output is copied until nothing was written for so long.
_DRAIN_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.05
_NO_SINKS = "Standard output and error go where writes cannot be seen (/dev/null), and no --output names another file."
_MIN_STALL_SECONDS = 1.0
# A rank that imports modules for longer than this hangs.
_MAX_START_SECONDS = 600.0


class Silence:
    """Decides when a look at the ranks is due while nothing is written, and counts the looks at this silence."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self.looks = 0
        self._next_look_seconds = stall_seconds

    def is_due(self, silent_seconds: float) -> bool:
        """Whether a look is due after `silent_seconds`. If that is less than --stall, start to count looks from 0."""
        if silent_seconds < self._stall_seconds:
            self.looks, self._next_look_seconds = 0, self._stall_seconds
            return False
        return silent_seconds >= self._next_look_seconds

    def count_look(self) -> None:
        """Count a look. The next one is due after twice as long a silence."""
        self.looks += 1
        self._next_look_seconds *= 2


class Watch:
    """Watches one command from its start to its end."""

    def __init__(self, program: str, options: WatchArgs, command: Child, output: CommandOutput) -> None:
        self._program = program
        self._options = options
        self._command = command
        self._output = output
        self._peers = Peers(os.environ, command.pid)
        self._reporter = Reporter(options)
        self._observer = Observer(lambda: [peer.command_pid for peer in self._peers.all()])
        self._order = EndOrder()
        self._rank_files = RankFileSink(self._observer.rank_pids)
        self._monitor = OutputMonitor([*output.sinks, self._rank_files])
        self._silence = Silence(options.stall + output.resolution_seconds)
        self._last_progress = time.monotonic()  # the last sign of progress other than output
        self._last_turn = time.monotonic()
        self._previous_look: Look | None = None  # at the same silence
        self._shown_refusals: set[str] = set()
        self._got_ending_signal = False  # the command received a signal that ends it
        self.bug: str | None = None  # a traceback; if set, the command is no longer watched
        self.kill_exit_code: ExitCode | None = None

    def run(self) -> None:
        """Watch until the command has ended."""
        while not self._command.has_ended():
            received = self._command.next_signal(_POLL_SECONDS)
            now = time.monotonic()
            if now - self._last_turn > _GAP_SECONDS:
                self._last_progress = now
            self._last_turn = now
            if not self._command.has_ended() and self.bug is None:
                try:
                    self._look_if_due(requested=received is not None and received.signum == signal.SIGUSR1)
                except Exception:  # noqa: BLE001 - an edge: a bug in ddpdiag must not end a training
                    self.bug = traceback.format_exc()
            if received is not None and received.signum not in (signal.SIGUSR1, signal.SIGCHLD):
                self._pass_on(received.signum, reached_command=received.reached_command)
        # Copy the rest of the output, however slow its reader is, until a signal asks this process to end.
        relays, ended_at = self._output.relays.values(), time.monotonic()
        while any(relay.is_copying(_DRAIN_SECONDS, ended_at) for relay in relays):
            received = self._command.next_signal(_DRAIN_POLL_SECONDS)
            if received is not None and received.signum in ENDING_SIGNALS:
                return

    def explain_failure(self) -> None:
        """Print why the command failed, if its output shows it, and no ending signal, --kill or bug came before."""
        status = self._command.status
        quiet = self._got_ending_signal or self.kill_exit_code is not None or self.bug is not None
        sinks = [*self._output.sinks, self._rank_files]
        if status and not quiet and (text := failure_text(sinks, status, [*self._order.ends])):
            complain(text)

    def _pass_on(self, signum: int, *, reached_command: bool) -> None:
        self._got_ending_signal |= signum in ENDING_SIGNALS
        refusal = "" if reached_command else self._command.send(signum)
        if refusal and refusal not in self._shown_refusals:
            self._shown_refusals.add(refusal)
            with self._monitor.ignore_writes():
                complain(refusal)
        if signum == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # as SIGTSTP would have done, until SIGCONT is sent
        if signum in (signal.SIGTSTP, signal.SIGCONT):
            self._last_progress = time.monotonic()

    def _look_if_due(self, *, requested: bool) -> None:
        self._observer.refresh()
        self._order.follow(self._observer.ranks)
        is_requested = requested and self._peers.request_look()
        silent_seconds = time.monotonic() - max(self._monitor.last_write, self._last_progress)
        is_due = self._silence.is_due(silent_seconds)
        if not self._silence.looks:
            self._previous_look = None
        if is_requested or (is_due and self._peers.is_leader()):
            look = self._take_look(silent_seconds, is_requested=is_requested)
            if is_requested:
                self._report(look)
            else:
                self._handle_silence(look)

    def _handle_silence(self, look: Look) -> None:
        """Report a look, unless ranks import modules or post collectives. With --kill, end the command if it hangs."""
        silent_seconds = look.silent_seconds
        if look.progress_age_seconds is not None and look.progress_age_seconds < self._options.stall:
            self._last_progress = time.monotonic() - look.progress_age_seconds
        elif look.is_starting and silent_seconds < _MAX_START_SECONDS:
            self._last_progress = time.monotonic()
        # If the job continued during the look, the ranks were seen at different moments.
        if time.monotonic() - max(self._monitor.last_write, self._last_progress) >= silent_seconds:
            self._silence.count_look()
            self._report(look)
            if self._options.kill and self._silence.looks > 1 and look.proves_a_hang:
                self.kill_exit_code = ExitCode.UNFIT if judge(look)[0].ranks else ExitCode.UNKNOWN
                complain(f"--kill: nothing new for {silent_seconds:.0f} s; SIGTERM to {readable(self._program)}")
                self._observer.end_all()

    def _report(self, look: Look) -> None:
        with self._monitor.ignore_writes():
            self._reporter.report(look)
        self._last_turn = time.monotonic()  # so that a long report does not look like a stop of this process

    def _take_look(self, silent_seconds: float, *, is_requested: bool) -> Look:
        look = Look(
            host=readable(socket.gethostname()),
            unix_seconds=time.time(),
            silent_seconds=silent_seconds,
            stall_seconds=self._options.stall,
            command=Path(self._program).name,
            is_requested=is_requested,
            missing_evidence=() if self._output.sinks or self._rank_files.names else (_NO_SINKS,),
            has_flight_recorder=self._options.flight_recorder,
        )
        look = self._observer.observe(look)
        blocked_seconds = max((relay.blocked_seconds() for relay in self._output.relays.values()), default=0.0)
        previous, self._previous_look = self._previous_look, look
        return structs.replace(look, blocked_seconds=blocked_seconds, all_unmoved=look.is_unmoved(previous))


def _attach(command: Sequence[str], options: WatchArgs) -> int:
    from ddpdiag.watch import attach

    if command:
        raise UsageError(
            f"expected no command with --pid or --attach, got {readable(command[0])}: the job runs already"
        )
    if options.pid and options.attach:
        raise UsageError("--attach: expected no --pid, since it finds the job itself")
    for name in ("kill", "output", "flight_recorder"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')}: works only with a command that `ddpdiag watch` starts")
    if not options.attach:
        return attach.run(options)
    from ddpdiag.watch import hosts  # it imports ZeroMQ and all checks

    return hosts.run(options)


def _check(command: Sequence[str], options: WatchArgs) -> None:
    """Raise UsageError if the command cannot be watched with these options."""
    if options.every is not None:
        raise UsageError("--every: expected --pid or --attach as well, since it looks at a job that runs already")
    if not command:
        raise UsageError("expected a command after --, such as torchrun train.py, or --pid PID of a job that runs")
    if not command[0]:
        raise UsageError("the command to watch is empty: expected a command after --, such as torchrun train.py")
    program = os.path.basename(command[0])
    if options.flight_recorder and program in LAUNCHERS:
        # The folder for NCCL's pipes exists on this host only, and NCCL ends a rank that cannot create its pipe.
        raise UsageError(
            f"--flight-recorder: {program} starts ranks on other hosts, where its files do not exist; start "
            f"`ddpdiag watch` on each host: `{program} ddpdiag watch --flight-recorder -- COMMAND`"
        )
    if not math.isfinite(options.stall) or options.stall < _MIN_STALL_SECONDS:
        raise UsageError(f"--stall {options.stall:g}: expected {_MIN_STALL_SECONDS:g} s or more")


def run(command: Sequence[str], options: WatchArgs) -> int:
    """Run the command and return its exit code, or 1 or 3 after --kill. If a signal killed it, die by that signal."""
    if options.pid or options.attach:
        return _attach(command, options)
    _check(command, options)
    # srun may start one `ddpdiag watch` for each rank; each passes a request on to the one that reports.
    if not options.quiet and all(os.environ.get(name, "0") == "0" for name in LOCAL_RANK_VARIABLES):
        complain(f"to request a report: kill -USR1 {os.getpid()}")
    output = open_output(options.output)
    folder = tempfile.mkdtemp(prefix="ddpdiag-watch-") if options.flight_recorder else None
    try:
        env = os.environ | (recorder_variables(folder) if folder is not None else {})
        child = Child(command, env, {number: relay.descriptor for number, relay in output.relays.items()})
        for relay in dict.fromkeys(output.relays.values()):
            relay.start()
        watch = Watch(command[0], options, child, output)
        if find_py_spy() is None:
            complain(f"reports will show no stacks: {NO_PY_SPY}")
        watch.run()
        watch.explain_failure()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if watch.bug is not None:
        complain(f"a bug in ddpdiag ended the watching, not the command; please report this text:\n{watch.bug}")
    if watch.kill_exit_code is not None:
        return watch.kill_exit_code
    return 0 if child.status is None else exit_like(child.status)
