"""What is known of missing ranks: notes in the shared folder by those that cannot reach rank 0, and answering hosts.

A note lies there only while its writer lives and searches; rank 0 looks for notes while it waits. One of a dead run is
older than this one, and one of another user is not read.
"""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from ddpdiag.model import Arrival, Event, EventKind
from ddpdiag.model.recording import Line
from ddpdiag.probes.net.tcp_connect import answers, is_loopback, resolve
from ddpdiag.runtime.deadlines import DEADLINES

_MOST_BYTES = 4096
_LOOK_SECONDS = 0.5
# Clocks of hosts and file servers differ.
_SKEW_SECONDS = 30.0


class Note(Struct, frozen=True):
    """What a rank says that did not reach rank 0."""

    rank: int
    world_size: int
    node: str
    sentence: str


class NoteWriter:
    """A rank's own note; `name` is that of the run's local folders."""

    def __init__(self, shared_dir: str, name: str, arrival: Arrival) -> None:
        self._folder = _notes_folder(shared_dir, name)
        self._arrival = arrival
        self._path = self._folder / f"rank-{arrival.place.rank}-{arrival.nonce}"
        self._executor = ThreadPoolExecutor(1)
        self._left = False

    def write(self, sentence: str) -> None:
        """Write it, in a thread."""
        self._left = True
        place = self._arrival.place
        note = Note(place.rank, place.world_size, place.node, sentence[: _MOST_BYTES // 4])
        self._executor.submit(self._write, msgspec.json.encode(note))

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the note is lost, not the run
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(self._folder):
                return
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        """Remove it."""
        if self._left:
            with contextlib.suppress(TimeoutError):
                self._executor.submit(self._remove).result(DEADLINES.tidy)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._folder.rmdir()


class NoteReader:
    """Reads notes for rank 0, in a thread, until it is told to stop."""

    def __init__(self, shared_dir: str, name: str, *, world_size: int, wait_seconds: float) -> None:
        self._folder = _notes_folder(shared_dir, name)
        self._world_size = world_size
        self._since = time.time() - wait_seconds - _SKEW_SECONDS
        self._found: dict[int, Note] = {}
        self._over = threading.Event()
        threading.Thread(target=self._look, name="notes", daemon=True).start()

    @property
    def found(self) -> Mapping[int, Note]:
        """The last note of each rank, so far."""
        return dict(self._found)

    def stop(self) -> Mapping[int, Note]:
        """The last note of each rank."""
        self._over.set()
        return self.found

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                notes = read_notes(self._folder, self._since)
                self._found |= {note.rank: note for note in notes if note.world_size == self._world_size}


def read_notes(folder: Path, since: float) -> Iterator[Note]:
    """Our own user's notes that were written after `since` (Unix time), oldest first. OSError where there are none."""
    if not _is_ours(folder):
        return
    for path in sorted(folder.glob("rank-*"), key=lambda path: path.lstat().st_mtime):
        state = path.lstat()
        plain = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
        if plain and state.st_mtime >= since and state.st_size <= _MOST_BYTES:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                yield msgspec.json.decode(path.read_bytes(), type=Note)


def with_notes(lines: Sequence[Line], notes: Mapping[int, Note]) -> list[Line]:
    """The lines with what absent ranks said of themselves."""
    return [_with_note(line, notes) for line in lines]


def _with_note(line: Line, notes: Mapping[int, Note]) -> Line:
    if not isinstance(line, Event) or line.kind is not EventKind.ABSENT or line.rank is None:
        return line
    note = notes.get(line.rank)
    return line if note is None else structs.replace(line, node=note.node, detail=note.sentence)


def _is_ours(folder: Path) -> bool:
    """Anybody can make a folder or a link of this name in a directory that all may write to."""
    state = folder.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()


def _notes_folder(shared_dir: str, name: str) -> Path:
    return Path(shared_dir) / f"{name}-notes"


# Hosts of lost ranks -------------------------------------------------------------------------------------------------

# A kernel answers for closed ports, too; behind a firewall that lets only some ports through, ssh's is the likeliest.
_SSH_PORT = 22
_MOST_HOSTS = 64  # where more are lost at once, these say enough


def with_host_answers(lines: Sequence[Line], me: int, coordinator: str, port: int) -> list[Line]:
    """The lines, in which lost ranks on other hosts than that of rank `me` say whether their host answers.

    Rank 0's host is looked for under the name `coordinator`. Takes a second or two when somebody was lost.
    """
    arrivals = {line.place.rank: line for line in lines if isinstance(line, Arrival)}
    lost = {line.rank for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST}
    hosts = {arrivals[rank].host: rank for rank in lost if rank in arrivals}
    if me in arrivals:
        hosts.pop(arrivals[me].host, None)
    if not hosts:
        return list(lines)
    some = dict(islice(hosts.items(), _MOST_HOSTS))
    with ThreadPoolExecutor(len(some)) as pool:
        said = pool.map(lambda rank: _answers(arrivals, rank, coordinator, port), some.values())
        heard = dict(zip(some, said, strict=True))
    return [_with_host_answer(line, arrivals, heard) for line in lines]


def _answers(arrivals: Mapping[int, Arrival], rank: int, coordinator: str, port: int) -> bool | None:
    """None where no address of it is known: a name that cannot be resolved says nothing of the host."""
    own = arrivals[rank]
    addresses: tuple[str, ...] = (own.address,)
    if 0 in arrivals and own.host == arrivals[0].host:  # rank 0 reached itself over loopback
        addresses = resolve(coordinator, port, DEADLINES.host_answer) or ()
    asked = [address for address in addresses[:2] if address and not is_loopback(address)]
    return any(answers(address, (port, _SSH_PORT), DEADLINES.host_answer) for address in asked) if asked else None


def _with_host_answer(
    line: Line, arrivals: Mapping[int, Arrival], heard: Mapping[tuple[str, str], bool | None]
) -> Line:
    if not isinstance(line, Event) or line.kind is not EventKind.LOST or line.rank is None:
        return line
    own = arrivals.get(line.rank)
    return structs.replace(line, answers=heard.get(own.host)) if own is not None else line
