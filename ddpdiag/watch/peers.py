"""One report for each host, however many `ddpdiag watch` run there: `srun ddpdiag watch -- python train.py`.

Those of one job use one abstract Unix socket, which has no file and ends with its process. The first one leads: once a
second the others send it the process that they started and how long that was silent, and it looks at all ranks of the
host. Mostly only rank 0 prints, so the shortest silence counts. A peer that gets no answer from the leader (it is
stopped, or another user has taken the name) leads itself, and so does one that the leader refuses: two trainings may
run in one step, and then both have a peer of the same number.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping

import msgspec
from msgspec import Struct, structs

from ddpdiag.probes.host.environment import is_pseudo_step
from ddpdiag.runtime.launchers.launch import digest

_MOST_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SCM_CREDENTIALS
_TELL_SECONDS = 1.0
# A leader answers at its next turn, and a look takes some seconds.
_PATIENCE_SECONDS = 8.0
# Variables that all processes of one launch have in common, by launcher.
_JOBS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("MASTER_ADDR", "MASTER_PORT", "RANK"),
)
# Variables that distinguish the peers of one launch, and those that distinguish launches.
_NUMBERS = ("SLURM_PROCID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
_RUNS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_ACCEPTED, _REFUSED = b"1", b"0"


class Identity(Struct, frozen=True):
    """One peer: its number in its launch, and the launch."""

    number: str = ""
    run: str = ""


class Message(Struct, frozen=True, omit_defaults=True):
    """A message of a peer: the process that it started, how long it was silent, and whether a look is requested."""

    pid: int
    silent_seconds: float
    asked: bool = False
    who: Identity = Identity()


class PeersSeen(Struct, frozen=True):
    """The state of the leader's peers: their processes and their shortest silence."""

    leads: bool
    pids: tuple[int, ...] = ()
    silent_seconds: float = float("inf")
    asked: bool = False


_message: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def job_name(env: Mapping[str, str]) -> str | None:
    """A name that all `ddpdiag watch` of one launch share; None where the environment names none."""
    # In the shell of `salloc` and in a batch script more than one training may run.
    for names in _JOBS[2:] if is_pseudo_step(env) else _JOBS:
        values = [env.get(name, "") for name in names]
        if all(values):
            # Ranks differ, but who has one was launched by hand, and meets the others at their store.
            return digest(os.getuid(), *(v for n, v in zip(names, values, strict=True) if n != "RANK"))
    return None


def identity(env: Mapping[str, str], *, kill: bool) -> Identity:
    """The identity of this process by its environment; a launch has --kill for all of its processes or for none."""
    number = "/".join(env.get(name, "") for name in _NUMBERS)
    return Identity(number, digest(kill, *(env.get(name, "") for name in _RUNS)))


class Peers:
    """The other `ddpdiag watch` of one launch on this host: leads them, or reports to their leader."""

    def __init__(self, name: str | None, who: Identity) -> None:
        self._who = who
        self._address = None if name is None else f"\0ddpdiag-watch-{name}"
        self._socket = _open_socket()
        self._messages: dict[int, tuple[float, Message]] = {}
        self._asked = False
        self._told = 0.0
        self._answered = time.monotonic()
        self._leads = self._bind()

    def _bind(self) -> bool:
        if self._address is None:
            return True
        try:
            self._socket.bind(self._address)
        except OSError:
            with contextlib.suppress(OSError):
                self._socket.bind("")  # any free name, so that the leader can answer
            return False
        return True

    def request_look(self) -> None:
        """A look is requested, now."""
        self._asked = True
        self._told = 0.0

    def exchange(self, pid: int, silent_seconds: float) -> PeersSeen:
        """Receive all messages, and send one to the leader if it is time to."""
        self._receive()
        if not self._leads:
            self._tell(Message(pid, silent_seconds, self._asked, self._who))
        if not self._leads:
            return PeersSeen(leads=False)
        now = time.monotonic()
        fresh = self._fresh()
        asked = self._asked or any(message.asked for _, message in fresh.values())
        self._asked = False
        self._messages = {pid: (at, structs.replace(message, asked=False)) for pid, (at, message) in fresh.items()}
        silent = min((now - at + message.silent_seconds for at, message in fresh.values()), default=float("inf"))
        return PeersSeen(True, tuple(fresh), silent, asked)

    def _fresh(self) -> dict[int, tuple[float, Message]]:
        now = time.monotonic()
        return {pid: (at, message) for pid, (at, message) in self._messages.items() if now - at < _PATIENCE_SECONDS}

    def _receive(self) -> None:
        while True:
            try:
                data, ancillary, _, sender = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return
            senders = [payload for _, kind, payload in ancillary if kind == socket.SCM_CREDENTIALS]
            if not any(
                len(own) >= _CREDENTIALS.size and _CREDENTIALS.unpack_from(own)[1] == os.getuid() for own in senders
            ):
                continue
            if not self._leads:
                self._answered = time.monotonic()
                if data == _REFUSED:
                    self._leads = True
                continue
            with contextlib.suppress(msgspec.DecodeError, OSError):
                message = _message.decode(data)
                # A peer of another launch, or with the number of another peer, is refused.
                others = (own.who.number for pid, (_, own) in self._fresh().items() if pid != message.pid)
                if message.who.run != self._who.run or message.who.number in (self._who.number, *others):
                    self._socket.sendto(_REFUSED, socket.MSG_DONTWAIT, sender)
                    continue
                before = self._messages.get(message.pid)
                asked = message.asked or (before is not None and before[1].asked)
                self._messages[message.pid] = time.monotonic(), structs.replace(message, asked=asked)
                self._socket.sendto(_ACCEPTED, socket.MSG_DONTWAIT, sender)

    def _tell(self, message: Message) -> None:
        now = time.monotonic()
        if now - self._told < _TELL_SECONDS or self._address is None:
            return
        self._told = now
        try:
            self._socket.sendto(msgspec.json.encode(message), socket.MSG_DONTWAIT, self._address)
            self._asked = False
        except BlockingIOError:
            pass  # it has not read for a while
        except OSError:
            self._socket.close()
            self._socket = _open_socket()
            self._answered = time.monotonic()
            self._leads = self._bind()
            return
        if now - self._answered > _PATIENCE_SECONDS:
            self._leads = True

    def close(self) -> None:
        """Close the socket: the next peer that sends a message here becomes the leader."""
        self._socket.close()


def _open_socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    opened.setblocking(False)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel adds the sender
    return opened
