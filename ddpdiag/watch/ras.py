"""`RasReader`: ask NCCL's RAS about the ranks of a look."""

import time
from collections.abc import Collection

from ddpdiag.evidence.ras import ADDRESS_VARIABLE, DEFAULT_ADDRESS, ENABLE_VARIABLE, Snapshot, read_snapshot
from ddpdiag.probes.gpu.visibility import holds_gpu
from ddpdiag.probes.host.kernel import PROC, read_pairs
from ddpdiag.watch.look import RasEvidence
from ddpdiag.watch.processes import Process

# How long counts must not change: far longer than a collective takes to launch.
_WINDOW_SECONDS = 1.0
_ANSWER_SECONDS = 2.0


class RasReader:
    """Reads the RAS of one job. It compares an answer with the oldest one that shows the same counts."""

    def __init__(self, window_seconds: float = _WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._oldest: tuple[Snapshot, float] | None = None

    def read(self, ranks: Collection[Process], world_size: int | None, end: float) -> RasEvidence:
        """Ask RAS twice until `end` (time.monotonic), if ranks hold GPUs or name its address."""
        ranks = [each for each in ranks if ADDRESS_VARIABLE in each.environ or holds_gpu(each.pid)]
        if not ranks:
            return RasEvidence()
        if any(each.environ.get(ENABLE_VARIABLE, "1") != "1" for each in ranks):
            return RasEvidence(why_missing=f"{ENABLE_VARIABLE} is not 1")
        address = ranks[0].environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        pids = {pid for each in ranks for pid in _own_pids(each.pid)}
        first = read_snapshot(address, pids, world_size, min(end, time.monotonic() + _ANSWER_SECONDS))
        if isinstance(first, str):
            return RasEvidence(why_missing=first)
        if self._oldest is None or self._oldest[0] != first:
            self._oldest = first, time.monotonic()
        oldest, since = self._oldest
        time.sleep(max(0.0, since + self._window_seconds - time.monotonic()))
        second = read_snapshot(address, pids, world_size, min(end, time.monotonic() + _ANSWER_SECONDS))
        if isinstance(second, str):
            return RasEvidence(why_missing=second)
        return RasEvidence((oldest, second), time.monotonic() - since)


def _own_pids(pid: int) -> set[int]:
    """The process's ids here and in its container, by which NCCL knows it (NSpid of proc_pid_status(5))."""
    return {pid, *map(int, read_pairs(PROC / str(pid) / "status", ":").get("NSpid", "").split())}
