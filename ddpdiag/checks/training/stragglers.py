"""Stragglers: the ranks for which the other ranks wait in a training step, and the reason.

An all-reduce ends on all ranks together, so the last rank to start it waits least. A rank is a straggler if, in nearly
all windows of steps, its own work takes longer than the median and it waits less than the median. A single window
proves nothing, because chance may disturb it. The work must also take at least 2 ms longer than on other ranks.
"""

from collections.abc import Iterator, Mapping, Set
from enum import StrEnum
from statistics import median
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.training.stolen_cores import intruding_processes, processes_text
from ddpdiag.checks.world import USUAL_RANKS_PER_CORE
from ddpdiag.model import Finding
from ddpdiag.model.measurements import Steps, Window
from ddpdiag.probes.host.programs import CoreUse
from ddpdiag.text import times_text

D = TypeVar("D")
# A rank whose `core_share` is below this multiple of the other ranks' has to share its cores with other processes.
_CORE_SHARE_RATIO = 0.8
# On a GPU a step of this small network takes a few ms, spent in Python and the launch of kernels. A rank on the other
# socket, or on a core with lower clocks, takes 1.5 times as long, which has no effect on real networks.
_MIN_EXCESS_SECONDS = 2e-3


class Reason(StrEnum):
    DATA = "data"
    COMPUTE = "compute"
    CORES = "cores"
    CLOCKS = "clocks"


_REASON_TEXTS = {
    Reason.DATA: "it waits for its images",
    Reason.COMPUTE: "it computes longer",
    Reason.CORES: "something else uses its cores",
    Reason.CLOCKS: "its GPU's clocks are held down",
}
_FIXES = {
    Reason.DATA: "Compare the disk or file server of that host with another host's (`iostat -x 1`, `mount`), or raise "
    "num_workers of its DataLoader.",
    Reason.COMPUTE: "Look there for other processes (`top`, `nvidia-smi`), and compare clocks with another rank's "
    "(`nvidia-smi -q -d CLOCK`, `lscpu`).",
    Reason.CORES: "Look for other processes on that host (`top`), for ranks that share cores (`taskset -cp PID`), and "
    "for limits of the control group.",
    Reason.CLOCKS: "Finding GPU005 of this report has its temperature and power. Have cooling and power supply "
    "checked.",
}


class Straggler(NamedTuple):
    """A rank that is late in `late_share` of windows: its median seconds of work, and those of the other ranks."""

    rank: int
    reason: Reason
    own_seconds: float
    usual_seconds: float
    late_share: float

    @property
    def ratio(self) -> float:
        """The rank's work as a multiple of that of the other ranks."""
        return self.own_seconds / max(self.usual_seconds, 1e-6)

    @property
    def slower_share(self) -> float:
        """The share of the job's speed that is lost because of the rank, at most."""
        return 1 - self.usual_seconds / self.own_seconds if self.own_seconds > 0 else 0.0


def find_stragglers(steps: Mapping[int, Steps], ratio: float, min_late_share: float) -> tuple[Straggler, ...]:
    """Find the stragglers. Returns none if they would be several ranks, and half of all ranks or more.

    In `min_late_share` of windows, a straggler works for more than `ratio` medians and waits less than the median.
    """
    if len(steps) < 2:
        return ()
    count = min(len(rank_steps.windows) for rank_steps in steps.values())
    late_windows: dict[int, int] = dict.fromkeys(steps, 0)
    for index in range(count):
        windows_by_rank = {rank: rank_steps.windows[index] for rank, rank_steps in steps.items()}
        work = median(window.own_seconds for window in windows_by_rank.values())
        wait = median(window.wait for window in windows_by_rank.values())
        for rank, window in windows_by_rank.items():
            late_windows[rank] += window.own_seconds > ratio * work and window.wait < wait
    ranks = [rank for rank, windows in late_windows.items() if count and windows >= min_late_share * count]
    late = [_straggler(rank, steps, late_windows[rank] / count) for rank in ranks]
    stragglers = tuple(each for each in late if each.own_seconds - each.usual_seconds > _MIN_EXCESS_SECONDS)
    return () if len(stragglers) > 1 and 2 * len(stragglers) >= len(steps) else stragglers


def _straggler(rank: int, steps: Mapping[int, Steps], late_share: float) -> Straggler:
    peers = [peer for other, peer in steps.items() if other != rank]
    data_excess, compute_excess = (
        _median_of(steps[rank], part) - median(_median_of(peer, part) for peer in peers)
        for part in ("data", "compute_seconds")
    )
    reason = Reason.DATA if data_excess > compute_excess else Reason.COMPUTE
    usual_core = median(_median_of(peer, "core_share") for peer in peers)
    if reason is Reason.COMPUTE and _median_of(steps[rank], "core_share") < _CORE_SHARE_RATIO * usual_core:
        reason = Reason.CORES
    usual_seconds = median(_median_of(peer, "own_seconds") for peer in peers)
    return Straggler(rank, reason, _median_of(steps[rank], "own_seconds"), usual_seconds, late_share)


def _median_of(steps: Steps, figure: str) -> float:
    """The median over all windows of the `Window` attribute with the name `figure`."""
    return median(float(getattr(window, figure)) for window in steps.windows)


def typical_window(steps: Steps) -> Window:
    """The window whose step has the median length."""
    return sorted(steps.windows, key=lambda window: window.own_seconds + window.wait)[len(steps.windows) // 2]


def median_step(steps: Mapping[int, Steps]) -> Window:
    """A step whose figures are medians over ranks, of each rank's median over windows."""
    return Window(*(median(_median_of(each, name) for each in steps.values()) for name in Window.__struct_fields__))


def straggler_findings(
    seen: Seen[D],
    steps: Mapping[int, Steps],
    throttled_gpus: Set[str],
    uses: Mapping[int, CoreUse],
    limits: tuple[float, float],
) -> Iterator[Finding]:
    """One finding for each straggler. `throttled_gpus` are UUIDs of GPUs with low clocks.

    `limits` are the ratio and the share of windows for `find_stragglers`. If ranks share cores (HST001), a rank with
    less of its core is not reported, because the next run may slow down another rank. If more than two ranks share each
    core, the times depend on the scheduler only, and no rank is named.
    """
    ranks_per_core = seen.world.ranks_per_core
    for straggler in find_stragglers(steps, *limits) if ranks_per_core <= USUAL_RANKS_PER_CORE else ():
        if ranks_per_core > 1 and straggler.reason is Reason.CORES:
            continue
        rank, reason = straggler.rank, straggler.reason
        gpus = devices.uuids_of(seen, [rank])
        if reason is Reason.COMPUTE and not throttled_gpus.isdisjoint(gpus):
            reason = Reason.CLOCKS
        intruding = intruding_processes(seen, rank, uses) if reason in (Reason.COMPUTE, Reason.CORES) else ()
        reason = Reason.CORES if intruding else reason
        yield seen.finding(
            "straggler",
            f"all ranks wait for rank {rank}: {_REASON_TEXTS[reason]}",
            f"Rank {rank} on {seen.world.host_name(rank)} is {times_text(straggler.ratio)} slower than the others "
            f"({1e3 * straggler.own_seconds:.1f} against {1e3 * straggler.usual_seconds:.1f} ms of work in a training "
            "step), and they wait for it in the all-reduce."
            f"{f' On its cores {processes_text(intruding)}.' if intruding else ''}",
            ranks=(rank,),
            gpus=gpus,
            evidence={
                "class": reason.value,
                "own_seconds": straggler.own_seconds,
                "usual_seconds": straggler.usual_seconds,
                "windows": straggler.late_share,
                "slower_share": straggler.slower_share,
            },
            fix=_FIXES[reason],
        )
