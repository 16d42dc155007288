"""What rank 0 leaves to the others in the shared folder, and how one of them takes it over."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ddpdiag.codec import read_lines
from ddpdiag.errors import RunLost
from ddpdiag.model import Arrival, Event, EventKind, Header, Report
from ddpdiag.model.recording import Line
from ddpdiag.runtime.answers import with_answers
from ddpdiag.runtime.control.messages import Shutdown
from ddpdiag.runtime.notes import Reader, explained
from ddpdiag.runtime.shared import RUN, Chronicle, Signs
from ddpdiag.runtime.succession import Succession, inherited

# A rank whose way to us was cut notices that 2 s after we do, and ends a trial before it looks for our verdict.
_READERS_SECONDS = 6.0
_DEPOSED_SECONDS = 2.0
_TIDY_SECONDS = 2.0
# Some signs of each rank: a file server removes a thousand files in a second or two.
_REMOVE_SECONDS = 10.0
# What rank 0 may spend on the shared folder after its farewell.
SHARED_END_SECONDS = _READERS_SECONDS + _TIDY_SECONDS


class Published(NamedTuple):
    """A report, and whether every file that was asked for could be written."""

    report: Report
    complete: bool


class Rank0At(NamedTuple):
    """The name under which rank 0's host is known here, and the job's port there."""

    host: str
    port: int


class Estate:
    """Rank 0's side: what it shares as it happens, and what it asks before it judges.

    `folder` is the run's shared folder, `notes` looks there for ranks that do not find us; None without `--shared-dir`.
    """

    def __init__(self, folder: Path | None, notes: Reader | None, lines: Callable[[], Sequence[Line]]) -> None:
        self._chronicle = Chronicle(folder, lines) if folder is not None else None
        self._notes = notes
        self._readers: tuple[int, ...] = ()

    def explain(self, lines: Sequence[Line], at: Rank0At) -> list[Line]:
        """The lines, with what absent ranks wrote, and whether hosts of lost ones answer.

        RunLost when another rank has made the report by now.
        """
        if self._chronicle is not None and self._chronicle.deposed(_DEPOSED_SECONDS):
            raise RunLost("rank 0 stood still for so long that another rank made the report in its place")
        notes = self._notes.stop() if self._notes is not None else {}
        told = with_answers(explained(lines, notes), 0, at.host, at.port)
        self._readers = tuple(cut_off(told))
        return told

    def close(self, farewell: Shutdown) -> None:
        """Tell the verdict to those who can hear us no more, and remove what was shared."""
        if self._chronicle is not None:
            self._chronicle.close(farewell, self._readers, _READERS_SECONDS if self._readers else 0.0)


def cut_off(lines: Sequence[Line]) -> list[int]:
    """Lost ranks that may live: their hosts do not answer, so perhaps the way to them is cut."""
    hosts = {line.place.rank: line.host for line in lines if isinstance(line, Arrival)}
    lost = [line for line in lines if isinstance(line, Event) and line.kind is EventKind.LOST and not line.answers]
    return [e.rank for e in lost if e.rank is not None and hosts.get(e.rank) not in (None, hosts.get(0))]


class Heir:
    """Another rank's side, when rank 0 is lost. `begin` is when this process came, on the monotonic clock."""

    def __init__(
        self,
        signs: Signs,
        header: Header,
        begin: float,
        at: Rank0At,
        publish: Callable[[Sequence[Line]], Published],
    ) -> None:
        self._signs = signs
        self._header = header
        self._begin = begin
        self._at = at
        self._publish = publish
        self._made: Published | None = None

    def inherit(self) -> tuple[Shutdown, str] | None:
        """The verdict, and a sentence for the user; None if there is none. The lowest living rank makes it itself."""
        farewell = Succession(self._signs, self._header.writer, self._take_over).run()
        if farewell is None:
            return None
        if self._made is None:
            return farewell, f"the verdict came through {self._signs.folder.parent}: {farewell.sentence}"
        if not self._made.complete:
            return farewell, f"the records of the run stay in {self._signs.folder}"
        with contextlib.suppress(TimeoutError):
            ThreadPoolExecutor(1).submit(self._signs.remove).result(_REMOVE_SECONDS)
        return farewell, "the report is made here"

    def _take_over(self, heirs: tuple[int, ...]) -> Shutdown:
        # Rank 0's own lines first, which count: it settled places and times.
        lines = read_lines([self._signs.folder / RUN, *sorted(self._signs.folder.glob("rank-*.jsonl"))])
        told = list(inherited(lines, self._header, heirs, time.monotonic() - self._begin))
        self._made = self._publish(with_answers(told, self._header.writer, self._at.host, self._at.port))
        nonces = {line.place.rank: line.nonce for line in told if isinstance(line, Arrival)}
        gone = {rank: nonce for rank, nonce in nonces.items() if rank not in heirs}
        return Shutdown(self._made.report.exit_code, self._made.report.sentence, gone)
