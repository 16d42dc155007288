"""One report for each host, however many `ddpdiag watch` run there: `srun ddpdiag watch -- python train.py`.

Those of one job meet at an abstract Unix socket, which has no file and goes with the process. The first one there
leads: the others tell it once a second which process they started and how long that was silent, and it looks at all
ranks of the host. Mostly rank 0 prints and the others do not: the silence that counts is the shortest. Who gets no
answer from the leader (it is stopped, or another user has taken the name) leads itself, and so does whom it refuses:
two trainings may run in one step, and then both have a fellow of the same number.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from ddpdiag.probes.host.variables import is_pseudo_step
from ddpdiag.runtime.said import digest

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
# What tells one of a launch from the others, and one launch from another.
_NUMBERS = ("SLURM_PROCID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
_RUNS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_WELCOME, _REFUSED = b"1", b"0"


class Who(Struct, frozen=True):
    """One fellow: its number in its launch, the launch, and whether --kill ends its command with the others."""

    number: str = ""
    run: str = ""
    kill: bool = False


class Word(Struct, frozen=True, omit_defaults=True):
    """What a fellow tells: the process that it started, how long it was silent, and whether a look is wanted."""

    pid: int
    silent_seconds: float
    asked: bool = False
    who: Who = Who()


class News(Struct, frozen=True):
    """What the leader knows of its fellows: their processes, those that --kill spares, and their shortest silence."""

    leads: bool
    pids: tuple[int, ...] = ()
    silent_seconds: float = float("inf")
    asked: bool = False
    spared: tuple[int, ...] = ()


_word: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)


def job_name(env: Mapping[str, str]) -> str | None:
    """The same for all `ddpdiag watch` of one launch; None where the environment names none."""
    # In the shell of `salloc` and in a batch script more than one training may run.
    for names in _JOBS[2:] if is_pseudo_step(env) else _JOBS:
        values = [env.get(name, "") for name in names]
        if all(values):
            # Ranks differ, but who has one was launched by hand, and meets the others at their store.
            return digest(os.getuid(), *(v for n, v in zip(names, values, strict=True) if n != "RANK"))
    return None


def who_we_are(env: Mapping[str, str], *, kill: bool) -> Who:
    """What tells us from our fellows, by the environment."""
    number = "/".join(env.get(name, "") for name in _NUMBERS)
    return Who(number, digest(*(env.get(name, "") for name in _RUNS)), kill)


class Fellows:
    """Leads, or tells the one that does."""

    def __init__(self, name: str | None, who: Who) -> None:
        self._who = who
        self._address = None if name is None else f"\0ddpdiag-watch-{name}"
        self._link = _link()
        self._words: dict[int, tuple[float, Word]] = {}
        self._asked = False
        self._told = 0.0
        self._answered = time.monotonic()
        self._leads = self._bind()

    def _bind(self) -> bool:
        if self._address is None:
            return True
        try:
            self._link.bind(self._address)
        except OSError:
            with contextlib.suppress(OSError):
                self._link.bind("")  # a name of our own, so that we can be answered
            return False
        return True

    def ask(self) -> None:
        """A look is wanted, now."""
        self._asked = True
        self._told = 0.0

    def exchange(self, pid: int, silent_seconds: float) -> News:
        """Hear what there is, and tell the leader if it is time to."""
        self._receive()
        if not self._leads:
            self._tell(Word(pid, silent_seconds, self._asked, self._who))
        if not self._leads:
            return News(leads=False)
        return self._news()

    def _news(self) -> News:
        now = time.monotonic()
        fresh = self._fresh()
        asked = self._asked or any(word.asked for _, word in fresh.values())
        self._asked = False
        self._words = {pid: (at, Word(pid, word.silent_seconds, who=word.who)) for pid, (at, word) in fresh.items()}
        silent = min((now - at + word.silent_seconds for at, word in fresh.values()), default=float("inf"))
        spared = tuple(pid for pid, (_, word) in fresh.items() if not word.who.kill)
        return News(True, tuple(fresh), silent, asked, spared)

    def _fresh(self) -> dict[int, tuple[float, Word]]:
        now = time.monotonic()
        return {pid: (at, word) for pid, (at, word) in self._words.items() if now - at < _PATIENCE_SECONDS}

    def _is_of_us(self, word: Word) -> bool:
        """Is it of our launch, and nobody's double?"""
        others = [self._who.number, *(own.who.number for pid, (_, own) in self._fresh().items() if pid != word.pid)]
        return word.who.run == self._who.run and word.who.number not in others

    def _receive(self) -> None:
        while True:
            try:
                data, ancillary, _, sender = self._link.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return
            if not any(_is_ours(payload) for _, kind, payload in ancillary if kind == socket.SCM_CREDENTIALS):
                continue
            if not self._leads:
                self._answered = time.monotonic()
                if data == _REFUSED:
                    self._leads = True
                continue
            with contextlib.suppress(msgspec.DecodeError, OSError):
                word = _word.decode(data)
                if not self._is_of_us(word):
                    self._link.sendto(_REFUSED, socket.MSG_DONTWAIT, sender)
                    continue
                before = self._words.get(word.pid)
                asked = word.asked or (before is not None and before[1].asked)
                self._words[word.pid] = time.monotonic(), Word(word.pid, word.silent_seconds, asked, word.who)
                self._link.sendto(_WELCOME, socket.MSG_DONTWAIT, sender)

    def _tell(self, word: Word) -> None:
        now = time.monotonic()
        if now - self._told < _TELL_SECONDS or self._address is None:
            return
        self._told = now
        try:
            self._link.sendto(msgspec.json.encode(word), socket.MSG_DONTWAIT, self._address)
            self._asked = False
        except BlockingIOError:
            pass  # it has not read for a while
        except OSError:
            self._lead()
            return
        if now - self._answered > _PATIENCE_SECONDS:
            self._leads = True

    def _lead(self) -> None:
        """The leader is gone: take its place, or else find out at the next turn who has."""
        self._link.close()
        self._link = _link()
        self._answered = time.monotonic()
        self._leads = self._bind()

    def close(self) -> None:
        """Leave: whoever tells us something next will lead."""
        self._link.close()


def _link() -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel says who has sent
    return link


def _is_ours(payload: bytes) -> bool:
    return len(payload) >= _CREDENTIALS.size and _CREDENTIALS.unpack_from(payload)[1] == os.getuid()
