"""A thread of the worker that says which collectives were posted last, while the main thread waits in one of them.

It needs the GIL to answer: a worker that holds it for ever, or is stopped, says nothing, and its supervisor waits for
that only for a moment. If it is wanted, and NCCL's RAS service runs in this process, it asks that, too.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from ddpdiag.model import Collective, Place
from ddpdiag.probes.process import ras
from ddpdiag.probes.recorder import Group, groups, posted
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.messages import Posted, Ras, decode_witness

THREAD_FILE = os.path.basename(__file__)
_QUESTION, _QUESTION_TO_NCCL = b"?", b"!"
# The supervisor waits a second for what NCCL says.
RAS_SECONDS = 1.0
_ASK_SECONDS = 0.9
_POLL_SECONDS = 0.02
_ASKING_RANKS, _ASKING_HOSTS = 2, 4


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
            while question := self._link.recv(len(_QUESTION)):
                end = time.monotonic() + _ASK_SECONDS
                # First what takes no time: to look for NCCL's service means to read /proc, slow on a busy host.
                self._link.send(msgspec.json.encode(Posted(self.posted())))
                if question == _QUESTION_TO_NCCL:
                    service = _service()
                    self._link.send(msgspec.json.encode(Ras(ras.status(service, end) if service is not None else "")))


def _service() -> ras.Address | None:
    """NCCL's service in this process, if it can be found."""
    try:
        return ras.own_service(os.environ)
    except (OSError, ValueError, IndexError):  # no /proc, or another form of it
        return None


def ask(link: socket.socket, *, nccl: bool = False) -> None:
    """The supervisor's side: put the question, to NCCL as well; a worker that is gone answers nothing."""
    with contextlib.suppress(OSError):
        link.send(_QUESTION_TO_NCCL if nccl else _QUESTION, socket.MSG_DONTWAIT)


def asks_nccl(place: Place) -> bool:
    """Does this rank ask NCCL, too? Each report is about the whole job, so two ranks of some hosts are enough."""
    return (place.local_rank or 0) < _ASKING_RANKS and (place.node_rank or 0) < _ASKING_HOSTS


def wait_answer(link: socket.socket, end: float, alive: Callable[[], bool]) -> Posted | Ras | None:
    """The next answer, until `end` of the monotonic clock or the worker's death."""
    said = answer(link)
    while said is None and time.monotonic() < end and alive():
        time.sleep(_POLL_SECONDS)
        said = answer(link)
    return said


def answer(link: socket.socket) -> Posted | Ras | None:
    """The next answer, if it is there."""
    try:
        data = link.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
    except OSError:
        return None
    return decode_witness.decode(data) if data else None
