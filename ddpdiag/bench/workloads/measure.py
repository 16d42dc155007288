"""One trial of the benchmark on one rank: a whole sweep, or one size with one partner."""

import os
import time

import torch
import torch.distributed as dist
from msgspec import structs

from ddpdiag.bandwidth import busbw
from ddpdiag.bench.data import Data, Line
from ddpdiag.bench.workloads.calls import finish
from ddpdiag.bench.workloads.operations import OUT_OF_PLACE_ONLY
from ddpdiag.bench.workloads.sweep import SweepContext, SweepResult, sweep
from ddpdiag.model.bench import Bench
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import Copier, affinity, cgroup, loopback_bytes_per_s
from ddpdiag.text import rate_text, size_text
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


def bench(ctx: Context, known: Data, device: torch.device, seconds: float) -> Data:
    """A sweep over the open group, within so many seconds; `known` is what this rank knows before it.

    From time to time it reports what there is so far.
    """
    end = _end(ctx, seconds)
    ctx.step("measure this rank's own limits")
    copies = _Copies(device)
    # All ranks measure at the same time: behind a barrier, as in the collective itself.
    dist.barrier()
    copy = copies.take(_COPY_SECONDS)
    dist.barrier()
    loopback = loopback_bytes_per_s(_LOOPBACK_SECONDS) if device.type != "cuda" else None
    limits = structs.replace(
        gpu_limits(device), copy_bytes_per_s=copy, loopback_bytes_per_s=loopback, cores=len(affinity()) or None
    )
    lines: list[Line] = []
    reported_at = time.monotonic()

    def on_line(line: Line) -> None:
        nonlocal reported_at
        lines.append(line)
        if len(lines) % _LINES_PER_MOMENT == 0:
            copies.take(_MOMENT_SECONDS)
        if time.monotonic() - reported_at > _REPORT_SECONDS + len(lines) * len(ctx.group) * _REPORT_SECONDS_PER_LINE:
            reported_at = time.monotonic()
            so_far = structs.replace(known, lines=tuple(lines), copies=tuple(copies.rates), limits=limits, whole=False)
            cell = line.in_place or line.out_of_place
            rate = busbw(known.collective, line.size_bytes, cell.seconds.median, known.ranks) if cell else 0.0
            what = f"{known.collective} {known.backend} {size_text(line.size_bytes)}"
            ctx.report(so_far, f"{what}: {rate_text(rate)}")

    asked, free = ctx.options.bench or Bench(), _free_bytes(ctx, device)
    result = sweep(SweepContext(asked, known.collective, device, free, end, ctx.step, on_line))
    for _ in range(_MOMENTS_AT_END):
        ctx.step("copy in this rank's own memory")
        dist.barrier()
        copies.take(_MOMENT_SECONDS)
    return structs.replace(known, **result._asdict(), copies=tuple(copies.rates), limits=limits)


def one_size(ctx: Context, asked: Bench, collective: str, device: torch.device, seconds: float) -> SweepResult:
    """One size, without own limits: two ranks alone, or all of them once more."""
    free, end = _free_bytes(ctx, device), _end(ctx, seconds)
    in_place = collective not in OUT_OF_PLACE_ONLY
    context = SweepContext(asked, collective, device, free, end, ctx.step, on_line=lambda _: None, modes=(in_place,))
    return sweep(context)


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
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._target.copy_(self._source)
            end.record()
            finish(self._device)
            self.rates.append(float(_GPU_COPY_BYTES / max(begin.elapsed_time(end) / 1e3, 1e-9)))
        else:
            self.rates.append(self._copier.bytes_per_s(seconds))
        return self.rates[-1]


def _free_bytes(ctx: Context, device: torch.device) -> int:
    """This rank's share of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host, group = memory(proc_root(os.environ)), cgroup(proc_root(os.environ), sys_root(os.environ)).memory
    free = [*([host.available_bytes] if host else []), *([group.left] if group else [])]
    return min(free, default=1 << 30) // max(1, ctx.place.local_world_size or 1)
