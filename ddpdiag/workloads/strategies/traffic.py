"""The share of time in which a collective, a send or a receive was under way, from torch's own profiler.

On a CPU that is from the call to its end on this rank, so waiting for a slower rank counts. On GPUs it is the time of
NCCL's kernels, which wait inside as well.
"""

import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

# Names of NCCL's kernels, since 2.19 and before.
_KERNELS = ("ncclDevKernel", "ncclKernel")


class Traffic:
    """Between `begin` and `end`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profiler = profile(activities=activities)
        self._begin = 0.0

    def begin(self) -> None:
        """Begin to watch."""
        self._profiler.start()
        self._begin = time.perf_counter()

    def end(self) -> float | None:
        """The share; None if nothing was seen, as where torch was built without a profiler for this device."""
        seconds = time.perf_counter() - self._begin
        self._profiler.stop()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events() or ()
            if self._is_communication(event.name, event.device_type)
        )
        return min(1.0, union(spans) / 1e6 / seconds) if spans else None

    def _is_communication(self, name: str, device_type: object) -> bool:
        if self._on_gpu:
            return device_type == torch.autograd.DeviceType.CUDA and name.startswith(_KERNELS)
        return name.startswith(f"{dist.get_backend()}:")


def union(spans: list[tuple[float, float]]) -> float:
    """The length of what the spans, in order of their starts, cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
