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
    """Reads the RAS of one job, and remembers the last answer to compare the next one with it."""

    def __init__(self) -> None:
        self._last: tuple[Snapshot, float] | None = None

    def read(self, ranks: Collection[Process], world_size: int | None, end: float) -> RasEvidence:
        """Ask RAS until `end` (time.monotonic), if ranks hold GPUs or name its address."""
        ranks = [each for each in ranks if ADDRESS_VARIABLE in each.environ or holds_gpu(each.pid)]
        if not ranks:
            return RasEvidence()
        if any(each.environ.get(ENABLE_VARIABLE) == "0" for each in ranks):
            return RasEvidence(why_missing=f"{ENABLE_VARIABLE}=0 disables it")
        address = ranks[0].environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        pids = {pid for each in ranks for pid in _own_pids(each.pid)}
        while True:
            answer = read_snapshot(address, pids, world_size, min(end, time.monotonic() + _ANSWER_SECONDS))
            now, earlier = time.monotonic(), self._last
            if isinstance(answer, str):
                return RasEvidence(why_missing=answer)
            if earlier is not None and now - earlier[1] >= _WINDOW_SECONDS:
                self._last = answer, now
                return RasEvidence((earlier[0], answer), now - earlier[1])
            self._last = earlier or (answer, now)
            time.sleep(_WINDOW_SECONDS)


def _own_pids(pid: int) -> set[int]:
    """The process's ids here and in its container, by which NCCL knows it (NSpid of proc_pid_status(5))."""
    return {pid, *map(int, read_pairs(PROC / str(pid) / "status", ":").get("NSpid", "").split())}
