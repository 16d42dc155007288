"""One trial of the benchmark on one rank: a whole sweep, or one size with one partner."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs

from ddpdiag.bench.data import Line
from ddpdiag.bench.workloads.calls import finish
from ddpdiag.bench.workloads.operations import OUT_OF_PLACE_ONLY
from ddpdiag.bench.workloads.sweep import SweepContext, SweepResult, sweep
from ddpdiag.model.bench import Bench, Limits
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import Copier, affinity, cgroup, loopback_bytes_per_s
from ddpdiag.workloads.devices import gpu_limits

# 250 ms for both of a CPU's limits; moments all along tell whether one rank is slower all the time.
_LOOPBACK_SECONDS = 0.2
_COPY_SECONDS = 0.05
_MOMENT_SECONDS = 0.02
_LINES_PER_MOMENT = 4
_MOMENTS_AT_END = 4
# A GPU's own memory is far quicker than a clock can tell of less.
_GPU_COPY_BYTES = 256 << 20
# What closing the group and answering takes.
_SHUTDOWN_SECONDS = 2.0
# Not more often. Each time all lines of all ranks go out again, some 800 bytes each, and rank 0 measures, too.
_REPORT_SECONDS = 0.5
_REPORT_SECONDS_PER_LINE = 800 / 5e6


class TrialResult(NamedTuple):
    """What a trial gave. `copies` are the rates of this rank's own copies at moments that all ranks share."""

    result: SweepResult
    copies: tuple[float, ...]
    limits: Limits


def bench(
    ctx: Context,
    asked: Bench,
    collective: str,
    device: torch.device,
    seconds: float,
    report: Callable[[TrialResult, Line], None],
) -> TrialResult:
    """A sweep over the open group, within so many seconds.

    `report` gets, from time to time, what there is so far and the last line.
    """
    end = _end(ctx, seconds)
    ctx.step("measure this rank's own limits")
    copies = _Copies(device)
    limits = _limits(device, copies)
    lines: list[Line] = []
    reported_at = time.monotonic()

    def on_line(line: Line) -> None:
        nonlocal reported_at
        lines.append(line)
        if len(lines) % _LINES_PER_MOMENT == 0:
            copies.take(_MOMENT_SECONDS)
        if time.monotonic() - reported_at > _REPORT_SECONDS + len(lines) * len(ctx.group) * _REPORT_SECONDS_PER_LINE:
            reported_at = time.monotonic()
            report(TrialResult(SweepResult(tuple(lines), (), ()), tuple(copies.rates), limits), line)

    free = _free_bytes(ctx, device)
    result = sweep(SweepContext(asked, collective, device, free, end, ctx.step, on_line))
    for _ in range(_MOMENTS_AT_END):
        ctx.step("copy in this rank's own memory")
        dist.barrier()
        copies.take(_MOMENT_SECONDS)
    return TrialResult(result, tuple(copies.rates), limits)


def one_size(ctx: Context, asked: Bench, collective: str, device: torch.device, seconds: float) -> TrialResult:
    """The same, without own limits: two ranks alone, or all of them once more."""
    free, end = _free_bytes(ctx, device), _end(ctx, seconds)
    in_place = collective not in OUT_OF_PLACE_ONLY
    context = SweepContext(asked, collective, device, free, end, ctx.step, on_line=lambda _: None, modes=(in_place,))
    return TrialResult(sweep(context), (), Limits())


def _end(ctx: Context, seconds: float) -> float:
    """When a sweep must be over: before the trial's deadline."""
    return min(ctx.end - _SHUTDOWN_SECONDS, time.monotonic() + seconds)


class _Copies:
    """This rank's own copies: in the memory of the CPU, or of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.rates: list[float] = []
        self._device = device
        if device.type == "cuda":
            self._source = torch.zeros(_GPU_COPY_BYTES, dtype=torch.uint8, device=device)
            self._target = torch.zeros_like(self._source)
        else:
            self._copier = Copier()

    def take(self, seconds: float) -> float:
        """One more rate, in bytes copied per second."""
        rate = self._by_events() if self._device.type == "cuda" else self._copier.bytes_per_s(seconds)
        self.rates.append(rate)
        return rate

    def _by_events(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._target.copy_(self._source)
        end.record()
        finish(self._device)
        return float(_GPU_COPY_BYTES / max(begin.elapsed_time(end) / 1e3, 1e-9))


def _limits(device: torch.device, copies: _Copies) -> Limits:
    """All ranks measure at the same time: behind a barrier, as in the collective itself."""
    dist.barrier()
    copy = copies.take(_COPY_SECONDS)
    dist.barrier()
    loopback = loopback_bytes_per_s(_LOOPBACK_SECONDS) if device.type != "cuda" else None
    return structs.replace(
        gpu_limits(device), copy_bytes_per_s=copy, loopback_bytes_per_s=loopback, cores=len(affinity()) or None
    )


def _free_bytes(ctx: Context, device: torch.device) -> int:
    """This rank's share of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host, group = memory(proc_root(os.environ)), cgroup(proc_root(os.environ), sys_root(os.environ)).memory
    free = [*([host.available_bytes] if host else []), *([group.left] if group else [])]
    return min(free, default=1 << 30) // max(1, ctx.place.local_world_size or 1)
