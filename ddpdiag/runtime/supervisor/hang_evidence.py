"""Evidence from a worker that did not end in time: its Python stacks, and the collectives that it posted last.

When its supervisor asks, a thread of the worker reads the collectives from torch's flight recorder, while the main
thread waits in a collective. The thread needs the GIL. If another thread holds the GIL for ever, or the worker is
stopped, no answer is sent, and the supervisor stops waiting after a moment.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ddpdiag.evidence.recorder import posted_collectives, why_unreadable
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.supervisor.ipc import PostedCollectives, decode_recorder_answer

RECORDER_READER_FILE = os.path.basename(__file__)
_QUESTION = b"?"
_POLL_SECONDS = 0.02


class RecorderReader:
    """The worker's side: a thread that reads the flight recorder whenever the supervisor asks."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._trial_unix_seconds = 0.0
        self._thread_is_started = False

    def start_trial(self) -> None:
        """Begin a trial, so that collectives of earlier trials in the same process group are left out."""
        self._trial_unix_seconds = time.time()
        if not self._thread_is_started:
            self._thread_is_started = True
            threading.Thread(target=self._serve, name="ddpdiag-recorder", daemon=True).start()

    def collectives(self) -> PostedCollectives:
        """The collectives posted in this trial, or the reason why they are unknown."""
        collectives = posted_collectives(self._trial_unix_seconds)
        return PostedCollectives(collectives, why_unreadable() if collectives is None else "")

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while self._channel.recv(len(_QUESTION)):
                self._channel.send(msgspec.json.encode(self.collectives()))


def ask_for_collectives(channel: socket.socket) -> None:
    """Ask a worker for its collectives, without waiting. Raises no error if the worker has ended."""
    with contextlib.suppress(OSError):
        channel.send(_QUESTION, socket.MSG_DONTWAIT)


def wait_for_answer(channel: socket.socket, end: float, is_alive: Callable[[], bool]) -> PostedCollectives | None:
    """Wait for the worker's answer. Returns None if it is not there at `end` (monotonic), or if the worker is dead."""
    while True:
        with contextlib.suppress(OSError):
            if data := channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                return decode_recorder_answer.decode(data)
        if time.monotonic() >= end or not is_alive():
            return None
        time.sleep(_POLL_SECONDS)


MAX_MAIN_FRAMES = 64
MAX_THREADS = 16
MAX_OTHER_FRAMES = 16
_MAX_FRAME_CHARACTERS = 160
# faulthandler writes these in place of further lines, after 100 frames of a thread and after 100 threads.
_FRAMES_CUT, _THREADS_CUT = "  ...", "..."


class Stacks(NamedTuple):
    """Stacks of the main thread and of the other threads. Frames are "function (file:line)", innermost first."""

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()


def read_stacks(dump: str) -> Stacks:
    """The stacks in a dump of faulthandler, which lists the oldest thread, the main thread, last."""
    threads = _parse_threads(dump)
    if not threads:
        return Stacks()
    *others, main = [*threads, []] if _THREADS_CUT in dump.splitlines() else threads
    foreign = [
        frames for frames in others if frames and not any(f"({RECORDER_READER_FILE}:" in frame for frame in frames)
    ]
    other_stacks = tuple(first_frames(frames, MAX_OTHER_FRAMES) for frames in foreign[:MAX_THREADS])
    return Stacks(first_frames(main, MAX_MAIN_FRAMES), other_stacks)


def first_frames(frames: Sequence[str], max_frames: int) -> tuple[str, ...]:
    """The innermost `max_frames` frames, and a line with the number of omitted frames, if there are any."""
    omitted = len(frames) - max_frames
    return tuple(frames) if omitted <= 0 else (*frames[:max_frames], f"... and {omitted} more frames")


def _parse_threads(dump: str) -> list[list[str]]:
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif threads and line.startswith("  File ") and ", line " in line:
            path, _, rest = line.removeprefix('  File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            threads[-1].append(f"{function} ({os.path.basename(path)}:{number})"[:_MAX_FRAME_CHARACTERS])
        elif threads and line == _FRAMES_CUT:
            threads[-1].append("...")
    return threads


class HangEvidence(NamedTuple):
    """Evidence from a process that did not end in time: its stacks and its last collectives."""

    stacks: Stacks = Stacks()
    posted: PostedCollectives = PostedCollectives()
