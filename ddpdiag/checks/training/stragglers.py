"""The ranks for which all others wait in a training step, and the reason.

An all-reduce ends on all ranks together, so the last rank to enter it waits least. A rank is a straggler if its own
work takes longer than the median, by some ms at least, and it waits less than the median, in nearly all windows: one
window proves nothing, since ranks are disturbed by chance.
"""

from collections.abc import Iterator, Mapping, Set
from enum import StrEnum
from statistics import median
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.training.stolen_cores import processes_beside, processes_text
from ddpdiag.checks.world import USUAL_RANKS_PER_CORE
from ddpdiag.model import Finding
from ddpdiag.model.measurements import Steps, Window
from ddpdiag.probes.host.programs import CoreUse
from ddpdiag.text import times_text

D = TypeVar("D")

# A rank whose core share is below this multiple of the others' share has to share its cores with other processes.
_LESS_CORE = 0.8
# On a GPU a step of this small network takes a few ms, spent in Python and the launch of kernels. A rank on the other
# socket, or on a core with lower clocks, takes half as much again; the longer steps of real networks hide that.
_LEAST_OWN_SECONDS = 2e-3


class Why(StrEnum):
    """The part of the step in which a straggler spends its time."""

    DATA = "data"
    COMPUTE = "compute"
    CORES = "cores"
    CLOCKS = "clocks"


_CLASSES = {
    Why.DATA: "it waits for its images",
    Why.COMPUTE: "it computes longer",
    Why.CORES: "something else uses its cores",
    Why.CLOCKS: "its GPU's clocks are held down",
}
_FIXES = {
    Why.DATA: "Compare the disk or file server of that host with another host's (`iostat -x 1`, `mount`), or raise "
    "num_workers of its DataLoader.",
    Why.COMPUTE: "Look there for other processes (`top`, `nvidia-smi`), and compare clocks with another rank's "
    "(`nvidia-smi -q -d CLOCK`, `lscpu`).",
    Why.CORES: "Look for other processes on that host (`top`), for ranks that share cores (`taskset -cp PID`), and for "
    "limits of the control group.",
    Why.CLOCKS: "Finding GPU005 of this report has its temperature and power. Have cooling and power supply checked.",
}


class Straggler(NamedTuple):
    """A rank for which others wait. `own` is its work in a step, `usual` that of the other ranks: medians in seconds.

    `windows` is the share of the windows in which they waited for it.
    """

    rank: int
    why: Why
    own: float
    usual: float
    windows: float

    @property
    def ratio(self) -> float:
        """The rank's work as a multiple of that of the other ranks."""
        return self.own / max(self.usual, 1e-6)

    @property
    def slower_share(self) -> float:
        """The largest share by which the rank slows the job down; work of other ranks may hide a part of it."""
        return 1 - self.usual / self.own if self.own > 0 else 0.0


def stragglers(steps: Mapping[int, Steps], ratio: float, share: float) -> tuple[Straggler, ...]:
    """Ranks whose work makes the others wait; none if several ranks, which are at least half of all, would be named.

    Such a rank works longer than `ratio` times the median and waits less than the median, in this share of the windows.
    """
    if len(steps) < 2:
        return ()
    count = min(len(own.windows) for own in steps.values())
    late: dict[int, int] = dict.fromkeys(steps, 0)
    for at in range(count):
        now = {rank: own.windows[at] for rank, own in steps.items()}
        work = median(window.own for window in now.values())
        wait = median(window.wait for window in now.values())
        for rank, window in now.items():
            late[rank] += window.own > ratio * work and window.wait < wait
    ranks = [rank for rank, windows in late.items() if count and windows >= share * count]
    found = [_straggler(rank, steps, late[rank] / count) for rank in ranks]
    found = [straggler for straggler in found if straggler.own - straggler.usual > _LEAST_OWN_SECONDS]
    return () if len(found) > 1 and 2 * len(found) >= len(steps) else tuple(found)


def _straggler(rank: int, steps: Mapping[int, Steps], windows: float) -> Straggler:
    others = [own for other, own in steps.items() if other != rank]
    data, compute = (_of(steps[rank], part) - median(_of(own, part) for own in others) for part in ("data", "compute"))
    why = Why.DATA if data > compute else Why.COMPUTE
    usual_core = median(_of(own, "core_share") for own in others)
    if why is Why.COMPUTE and _of(steps[rank], "core_share") < _LESS_CORE * usual_core:
        why = Why.CORES
    return Straggler(rank, why, _of(steps[rank], "own"), median(_of(own, "own") for own in others), windows)


def _of(steps: Steps, part: str) -> float:
    """The median of one figure of the windows, `part`, over all windows."""
    return median(float(getattr(window, part)) for window in steps.windows)


def typical_window(steps: Steps) -> Window:
    """The window whose step has the median length."""
    return sorted(steps.windows, key=lambda window: window.own + window.wait)[len(steps.windows) // 2]


def usual_step(steps: Mapping[int, Steps]) -> Window:
    """The usual step: each figure is the median over ranks of their medians."""
    return Window(*(median(_of(own, name) for own in steps.values()) for name in Window.__struct_fields__))


def step_findings(
    seen: Seen[D],
    steps: Mapping[int, Steps],
    throttled: Set[str],
    uses: Mapping[int, CoreUse],
    limits: tuple[float, float],
) -> Iterator[Finding]:
    """One finding for each straggler. `throttled` are GPUs whose clocks are held down; `limits` are ratio and share.

    If ranks share cores (HST001), a rank that gets less of a core is no straggler: in the next run it may be another
    rank. If more than two ranks share each core, the scheduler decides on all times, and no rank is named.
    """
    ranks_per_core = seen.world.ranks_per_core
    for own in stragglers(steps, *limits) if ranks_per_core <= USUAL_RANKS_PER_CORE else ():
        if ranks_per_core > 1 and own.why is Why.CORES:
            continue
        rank, gpus = own.rank, devices.uuids_of(seen, [own.rank])
        why = Why.CLOCKS if own.why is Why.COMPUTE and not throttled.isdisjoint(gpus) else own.why
        intruders = processes_beside(seen, rank, uses) if why in (Why.COMPUTE, Why.CORES) else ()
        why = Why.CORES if intruders else why
        yield seen.finding(
            "straggler",
            f"all ranks wait for rank {rank}: {_CLASSES[why]}",
            f"Rank {rank} on {seen.world.host_of(rank)} is {times_text(own.ratio)} slower than the others "
            f"({1e3 * own.own:.1f} against {1e3 * own.usual:.1f} ms of work in a training step), and they wait for it "
            f"in the all-reduce.{f' On its cores {processes_text(intruders)}.' if intruders else ''}",
            ranks=(rank,),
            gpus=gpus,
            evidence={
                "class": why.value,
                "own_seconds": own.own,
                "usual_seconds": own.usual,
                "windows": own.windows,
                "slower_share": own.slower_share,
            },
            fix=_FIXES[why],
        )
