"""Each supervisor's own record: written before anything is sent, so that it outlives rank 0."""

import contextlib
import os
import re
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from ddpdiag.codec import encode_line
from ddpdiag.errors import UsageError
from ddpdiag.model import Header, Outcome
from ddpdiag.model.recording import Line


def run_folder(run_id: str) -> Path:
    """The run's folder on this host, `$TMPDIR/ddpdiag-<run id>`, made for this user alone.

    If somebody else owns one of that name, a folder with a random suffix is made.
    """
    name = "ddpdiag-" + re.sub(r"[^A-Za-z0-9_.-]", "_", run_id)[:80]
    try:
        folder = Path(tempfile.gettempdir()) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.is_symlink():
            return folder
        return Path(tempfile.mkdtemp(prefix=name + "-"))
    except OSError as error:
        raise UsageError(f"no folder for the run's records: {error}; set TMPDIR to one that can be written") from error


class Record:
    """One rank's lines in `rank-<n>.jsonl` (mode 0600), and its scratch folder beside it."""

    def __init__(self, folder: Path, rank: int, header: Header) -> None:
        self.folder = folder
        self.rank = rank
        self.path = folder / f"rank-{rank}.jsonl"
        self.scratch = folder / f"scratch-{rank}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        self._descriptor = -1
        with contextlib.suppress(OSError):  # a full disk loses the copy, not the run
            self.scratch.mkdir(mode=0o700, exist_ok=True)
            self._move_old_aside()
            self._descriptor = os.open(self.path, flags, 0o600)
        self.outcomes = 0
        self.write(header)

    def _move_old_aside(self) -> None:
        """An earlier run of the same id kept its record: it is evidence, and no part of this run."""
        if self.path.exists():
            stamp = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%S")
            self.path.rename(self.folder / f"old-{stamp}-{self.path.name}")

    def write(self, line: Line) -> None:
        """Append a record. A full disk loses the copy, not the run."""
        self.outcomes += isinstance(line, Outcome)
        with contextlib.suppress(OSError):
            os.write(self._descriptor, encode_line(line))

    def keep(self) -> None:
        """Leave the record on disk, and nothing else: no scratch of ours, and none of rank 0's, which is lost."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        remove_scratch(self.folder, 0)

    def remove(self, others: tuple[int, ...] = ()) -> None:
        """Remove this rank's files, those of `others` that cannot do it themselves, and the folder when it is empty."""
        for rank in (*others, self.rank):
            with contextlib.suppress(OSError):
                (self.folder / f"rank-{rank}.jsonl").unlink()
            remove_scratch(self.folder, rank)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def remove_scratch(folder: Path, rank: int) -> None:
    """Remove a rank's scratch folder, whatever torch put into it, and the run's folder if that is empty now."""
    shutil.rmtree(folder / f"scratch-{rank}", ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
