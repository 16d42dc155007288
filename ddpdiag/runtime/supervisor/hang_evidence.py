"""Evidence of a worker that did not end in time: its Python stacks, and the collectives that it posted last.

A thread of the worker reads torch's flight recorder for the collectives, while the main thread waits in one of them.
The thread needs the GIL: if the worker holds the GIL for ever or is stopped, it does not answer, and its supervisor
stops waiting after a moment.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ddpdiag.model import Collective
from ddpdiag.probes.collectives import posted, unreadable
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.supervisor.ipc import PostedCollectives, decode_recorder_answer

THREAD_FILE = os.path.basename(__file__)
_QUESTION = b"?"
_POLL_SECONDS = 0.02


class RecorderReader:
    """The worker's end: reads the flight recorder when its supervisor asks."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._trial_unix_seconds = 0.0
        self._started = False

    def start_trial(self) -> None:
        """Begin a trial: collectives that were posted before, in a group that it may share, are left out."""
        self._trial_unix_seconds = time.time()
        if not self._started:
            self._started = True
            threading.Thread(target=self._serve, name="ddpdiag-recorder", daemon=True).start()

    def collectives(self) -> PostedCollectives:
        """The collectives posted in this trial, or the reason why they are not known."""
        collectives = posted(self._trial_unix_seconds)
        return PostedCollectives(collectives, unreadable() if collectives is None else "")

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while self._channel.recv(len(_QUESTION)):
                self._channel.send(msgspec.json.encode(self.collectives()))


def ask_for_collectives(channel: socket.socket) -> None:
    """Ask a worker for its collectives, without waiting; no error if the worker has ended."""
    with contextlib.suppress(OSError):
        channel.send(_QUESTION, socket.MSG_DONTWAIT)


def wait_for_answer(channel: socket.socket, end: float, alive: Callable[[], bool]) -> PostedCollectives | None:
    """The worker's next answer; None at `end` of the monotonic clock, or once the worker is dead."""
    while True:
        with contextlib.suppress(OSError):
            if data := channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                return decode_recorder_answer.decode(data)
        if time.monotonic() >= end or not alive():
            return None
        time.sleep(_POLL_SECONDS)


MOST_FRAMES = 64
MOST_THREADS = 16
MOST_THREAD_FRAMES = 16
_MOST_CHARACTERS = 160
# faulthandler writes these instead of more: after 100 frames of a thread, and after 100 threads.
_CUT, _THREADS_CUT = "  ...", "..."


class Stacks(NamedTuple):
    """Stacks of the main thread and of each other thread: frames "function (file:line)", innermost first."""

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()


def read_stacks(dump: str) -> Stacks:
    """The stacks in a dump, which lists the main thread, the oldest one, last."""
    threads = _threads(dump)
    if not threads:
        return Stacks()
    *others, main = [*threads, []] if _THREADS_CUT in dump.splitlines() else threads
    shown = [frames for frames in others if frames and not any(f"({THREAD_FILE}:" in frame for frame in frames)]
    kept = tuple(shortened(frames, MOST_THREAD_FRAMES) for frames in shown[:MOST_THREADS])
    return Stacks(shortened(main, MOST_FRAMES), kept)


def shortened(frames: Sequence[str], most: int) -> tuple[str, ...]:
    """The innermost `most` frames, and the number of frames left out."""
    left_out = len(frames) - most
    return tuple(frames) if left_out <= 0 else (*frames[:most], f"... and {left_out} more frames")


def _threads(dump: str) -> list[list[str]]:
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif threads and line.startswith("  File ") and ", line " in line:
            threads[-1].append(_frame(line))
        elif threads and line == _CUT:
            threads[-1].append("...")
    return threads


def _frame(line: str) -> str:
    path, _, rest = line.removeprefix('  File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({os.path.basename(path)}:{number})"[:_MOST_CHARACTERS]


class HangEvidence(NamedTuple):
    """Evidence from a process that did not end in time: its stacks and its last collectives, if there are any.

    `no_collectives` is the reason why there are none, if torch keeps no record.
    """

    stacks: Stacks = Stacks()
    collectives: tuple[Collective, ...] | None = None
    no_collectives: str = ""
