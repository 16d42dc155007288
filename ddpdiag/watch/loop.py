"""The loop of `ddpdiag watch`: pass signals on, listen, and look when nothing was heard for too long.

It looks once for each silence, and again after twice, four times ... the patience, so that a hang is not told for ever.
Time in which we were stopped ourselves does not count.
"""

import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from ddpdiag.codec import readable
from ddpdiag.errors import ExitCode
from ddpdiag.watch.apart import is_apart, stands_as
from ddpdiag.watch.child import Wrapped, end_all, stop_ourselves
from ddpdiag.watch.judge import is_start, judged, progress_age
from ddpdiag.watch.look import Lookout
from ddpdiag.watch.model import Judged, Stall
from ddpdiag.watch.output import Listener, Outlets
from ddpdiag.watch.peers import Fellows
from ddpdiag.watch.reporter import Mouth

_POLL_SECONDS = 1.0
# A turn of the loop that took so much longer than it should: we, or the whole machine, stood still.
_GAP_SECONDS = 4.0
# torchrun gives its ranks 30 s; a job that hangs will not use them.
GRACE_SECONDS = 10.0
_DRAIN_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.05
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FAR = (
    "--flight-recorder: {} below the command may start ranks on other hosts, and NCCL ends a rank that cannot make its "
    "pipe, for which we made the directory on this host only; start us behind it, on each host."
)
# Who imports for longer hangs in it.
_LONGEST_START_SECONDS = 600.0


class Wanted(NamedTuple):
    """What the command line asks for."""

    command: Sequence[str]
    stall_seconds: float
    kill: bool
    notes: tuple[str, ...] = ()
    files: Sequence[str] = ()  # of --output
    recorder: bool = False  # --flight-recorder


class Silence:
    """How long nothing was heard, and when to look."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall = stall_seconds
        self.number = 0
        self.looks = 0
        self._next = stall_seconds

    def is_due(self, silent_seconds: float) -> bool:
        """Is it time for a look? A sound ends the silence."""
        if silent_seconds < self._stall:
            self.looks, self._next = 0, self._stall
            return False
        return silent_seconds >= self._next

    def looked(self) -> None:
        """A look was taken: the next one comes after twice the time."""
        self.number += self.looks == 0
        self.looks += 1
        self._next *= 2


class Watch:
    """One command, from its start to its end."""

    def __init__(self, wanted: Wanted, command: Wrapped, outlets: Outlets, fellows: Fellows, mouth: Mouth) -> None:
        self._wanted = wanted
        self._command = command
        self._outlets = outlets
        self._fellows = fellows
        self._mouth = mouth
        self._listener = Listener(outlets.ears)
        self._lookout = Lookout([command.pid])
        self._silence = Silence(wanted.stall_seconds + outlets.step_seconds)
        self._since = time.monotonic()  # when there was any other progress than output
        self._turn = time.monotonic()
        self._before: Stall | None = None
        self._spared: tuple[int, ...] = ()  # commands of fellows that were started without --kill
        self.killed: int | None = None
        self.bug: str | None = None  # from then on the command runs unwatched

    def run(self) -> None:
        """Until the command has ended."""
        while not self._command.is_over():
            heard = self._command.hear(_POLL_SECONDS)
            self._note_gap()
            if heard is not None:
                self._obey(heard.signum, shared=heard.shared)
            if not self._command.is_over() and self.bug is None:
                self._watch_safely()
        self._drain()

    def _drain(self) -> None:
        """Pass on what the command has written, however slow its reader is; a signal ends that."""
        relays, ended = self._outlets.relays.values(), time.monotonic()
        while any(relay.is_owing(_DRAIN_SECONDS, ended) for relay in relays):
            heard = self._command.hear(_DRAIN_POLL_SECONDS)
            if heard is not None and heard.signum in _ENDING:
                return

    def _watch_safely(self) -> None:
        try:
            self._watch()
        except Exception:  # noqa: BLE001 - an edge: a bug of ours must not end somebody's training
            self.bug = traceback.format_exc()

    def _note_gap(self) -> None:
        now = time.monotonic()
        if now - self._turn > _GAP_SECONDS:
            self._since = now
        self._turn = now

    def _obey(self, signum: int, *, shared: bool) -> None:
        if signum == signal.SIGUSR1:
            self._fellows.ask()
            return
        if signum == signal.SIGCHLD:
            return
        if not shared:
            self._say(self._command.send(signum))
        if signum == signal.SIGTSTP:
            stop_ourselves()
        if signum in (signal.SIGTSTP, signal.SIGCONT):
            self._since = time.monotonic()

    def _say(self, sentence: str) -> None:
        with self._listener.ignoring():
            self._mouth.say_once(sentence)

    def _watch(self) -> None:
        self._lookout.keep_sight()
        if self._wanted.recorder and self._lookout.far_launcher:
            self._say(_FAR.format(self._lookout.far_launcher))
        last = max(self._listener.last, self._since)
        news = self._fellows.exchange(self._command.pid, time.monotonic() - last)
        if not news.leads:
            return
        self._spared = news.spared
        self._lookout.tops = [self._command.pid, *news.pids]
        self._since = max(self._since, time.monotonic() - news.silent_seconds)
        silent = time.monotonic() - max(last, self._since)
        if self._silence.is_due(silent):
            self._stalled(silent)
        elif news.asked:
            self._report(self._looked(silent, asked=True))

    def _stalled(self, silent: float) -> None:
        stall = self._looked(silent, asked=False)
        posted = progress_age(stall)
        if posted is not None and posted < self._wanted.stall_seconds:
            self._since = time.monotonic() - posted
        elif is_start(stall) and silent < _LONGEST_START_SECONDS:
            self._since = time.monotonic()
        # What goes on while we look was seen at several moments, and nothing fits together.
        if self._was_heard(silent):
            return
        why = self._why_not_kill(stall) if self._wanted.kill else ""
        stall = structs.replace(stall, notes=(*stall.notes, why) if why else stall.notes)
        self._silence.looked()
        verdict = self._report(stall, why)
        if self._wanted.kill and not why and not verdict.moving:
            self._kill(verdict)

    def _why_not_kill(self, stall: Stall) -> str:
        """A sentence where the silence does not prove that a healthy job would be heard; else nothing."""
        if progress_age(stall) is not None or self._outlets.files in self._listener.heard:
            return ""
        if not self._listener.heard:
            files = f", nor in {' '.join(map(readable, self._wanted.files))}" if self._wanted.files else ""
            return f"Not ended: nothing was ever heard of the command{files}, so that silence is no sign."
        if is_apart(stall):
            return "Not ended: rank 0 runs on another host, and no --output or flight recorder shows progress here."
        return ""

    def _was_heard(self, silent: float) -> bool:
        """Was there anything new since the silence was so long?"""
        return time.monotonic() - max(self._listener.last, self._since) < silent

    def _report(self, stall: Stall, why: str = "") -> Judged:
        verdict = judged(stall)
        with self._listener.ignoring():
            self._mouth.tell(stall, verdict, why)
        self._turn = time.monotonic()  # a look takes its time
        return verdict

    def _looked(self, silent: float, *, asked: bool) -> Stall:
        look = self._lookout.look()
        stall = Stall(
            host=self._lookout.host,
            unix_seconds=time.time(),
            silent_seconds=silent,
            stall_seconds=self._wanted.stall_seconds,
            command=Path(self._wanted.command[0]).name,
            asked=asked,
            number=self._silence.number + (self._silence.looks == 0),
            looks=self._silence.looks + 1,
            world_size=look.world_size,
            guessed=look.guessed,
            far_launcher=look.far_launcher,
            ranks=look.ranks,
            gpus=look.gpus,
            gpus_unseen=look.gpus_unseen,
            blocked_seconds=max((relay.blocked_seconds() for relay in self._outlets.relays.values()), default=0.0),
            notes=self._wanted.notes,
            variables=look.variables,
        )
        stall, self._before = structs.replace(stall, unmoved=stands_as(self._before, stall)), stall
        return stall

    def _kill(self, verdict: Judged) -> None:
        self.killed = ExitCode.UNFIT if verdict.named else ExitCode.UNKNOWN
        others = [pid for pid in self._lookout.tops[1:] if pid not in self._spared]
        self._say(end_all(self._command, others, lambda: self._lookout.living(self._spared), GRACE_SECONDS))
