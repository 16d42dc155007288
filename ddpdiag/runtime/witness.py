"""A thread of the worker that says which collectives were posted last, while the main thread waits in one of them.

It needs the GIL to answer: a worker that holds it for ever, or is stopped, says nothing, and its supervisor waits for
that only for a moment.
"""

import contextlib
import os
import socket
import threading

import msgspec

from ddpdiag.model import Collective
from ddpdiag.probes.recorder import Group, groups, posted
from ddpdiag.runtime.messages import MAX_MESSAGE_BYTES, Posted, decode_posted

THREAD_FILE = os.path.basename(__file__)
_QUESTION = b"?"


class Witness:
    """The worker's side."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._before: frozenset[Group] = frozenset()
        self._started = False

    def begin(self) -> None:
        """A trial begins, in which groups are opened anew: those of the trials before are no longer asked for."""
        self._before = groups()
        if not self._started:
            self._started = True
            threading.Thread(target=self._serve, name="ddpdiag-witness", daemon=True).start()

    def posted(self) -> tuple[Collective, ...] | None:
        """What was posted in this trial."""
        return posted(self._before)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while self._link.recv(len(_QUESTION)):
                self._link.send(msgspec.json.encode(Posted(self.posted())))


def ask(link: socket.socket) -> None:
    """The supervisor's side: put the question; a worker that is gone answers nothing."""
    with contextlib.suppress(OSError):
        link.send(_QUESTION, socket.MSG_DONTWAIT)


def answer(link: socket.socket) -> Posted | None:
    """The answer, if it is there."""
    try:
        data = link.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
    except OSError:
        return None
    return decode_posted.decode(data) if data else None
