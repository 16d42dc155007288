"""One trial of the benchmark on one rank: a sweep, and the rates at which this rank copies within its memory."""

import os
import time

import torch
import torch.distributed as dist
from msgspec import structs

from ddpdiag.bandwidth import busbw
from ddpdiag.bench.data import Data
from ddpdiag.bench.workloads.sweep import SweepContext, sweep
from ddpdiag.model.bench import Bench, RankRow
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import Copier, affinity, cgroup, loopback_bytes_per_s
from ddpdiag.text import rate_text, size_text
from ddpdiag.workloads.devices import link_limits, synchronize

# 250 ms for both limits of a CPU. Copies at moments of the whole sweep show whether one rank is slower all the time.
_LOOPBACK_SECONDS = 0.2
_COPY_SECONDS = 0.05
_MOMENT_SECONDS = 0.02
_ROWS_PER_MOMENT = 2
_MOMENTS_AT_END = 4
# Smaller copies in a GPU's memory are too short for a clock.
_GPU_COPY_BYTES = 256 << 20
# Time before the trial's end for closing the group and sending the result.
_SHUTDOWN_SECONDS = 2.0
# The least time between reports: each sends all rows of all ranks again, 300 bytes each, to rank 0, which measures too.
_REPORT_SECONDS = 0.5
_REPORT_SECONDS_PER_ROW = 300 / 5e6


def bench(ctx: Context, known: Data, device: torch.device, seconds: float) -> Data:
    """Run a sweep over the open group within `seconds`, report its rows from time to time, and add them to `known`."""
    # The end of the sweep on the monotonic clock, before the trial's deadline.
    end = min(ctx.end - _SHUTDOWN_SECONDS, time.monotonic() + seconds)
    ctx.step("measure this rank's own limits")
    copies = _Copies(device)
    # The barriers let all ranks measure at the same time, as they copy at the same time in a collective.
    dist.barrier()
    copy = copies.take(_COPY_SECONDS)
    dist.barrier()
    loopback = loopback_bytes_per_s(_LOOPBACK_SECONDS) if device.type != "cuda" else None
    limits = structs.replace(
        link_limits(device), copy_bytes_per_s=copy, loopback_bytes_per_s=loopback, cores=len(affinity()) or None
    )
    rows: list[RankRow] = []
    reported_at = time.monotonic()

    def on_row(row: RankRow) -> None:
        nonlocal reported_at
        rows.append(row)
        if len(rows) % _ROWS_PER_MOMENT == 0:
            copies.take(_MOMENT_SECONDS)
        if time.monotonic() - reported_at > _REPORT_SECONDS + len(rows) * len(ctx.group) * _REPORT_SECONDS_PER_ROW:
            reported_at = time.monotonic()
            so_far = structs.replace(known, rows=tuple(rows), copies=tuple(copies.rates), limits=limits, whole=False)
            rate = busbw(known.collective, row.size_bytes, row.median_seconds, known.ranks)
            what = f"{known.collective} {known.backend} {size_text(row.size_bytes)}"
            ctx.report(so_far, f"{what}: {rate_text(rate)}")

    asked, free = ctx.options.bench or Bench(), _free_bytes(ctx, device)
    result = sweep(SweepContext(asked, known.collective, device, free, end, ctx.step, on_row))
    for _ in range(_MOMENTS_AT_END):
        ctx.step("copy in this rank's own memory")
        dist.barrier()
        copies.take(_MOMENT_SECONDS)
    return structs.replace(known, **result._asdict(), copies=tuple(copies.rates), limits=limits)


class _Copies:
    """The rates of this rank's copies within the memory of its CPU or GPU."""

    def __init__(self, device: torch.device) -> None:
        self.rates: list[float] = []
        self._device = device
        if device.type == "cuda":
            self._source = torch.zeros(_GPU_COPY_BYTES, dtype=torch.uint8, device=device)
            self._target = torch.zeros_like(self._source)
        else:
            self._copier = Copier()

    def take(self, seconds: float) -> float:
        """Measure one more rate, in bytes copied per second."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._target.copy_(self._source)
            end.record()
            synchronize(self._device)
            self.rates.append(float(_GPU_COPY_BYTES / max(begin.elapsed_time(end) / 1e3, 1e-9)))
        else:
            self.rates.append(self._copier.bytes_per_s(seconds))
        return self.rates[-1]


def _free_bytes(ctx: Context, device: torch.device) -> int:
    """The free bytes for this rank: all of its GPU's, or an equal share of the host's (or cgroup's) free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host, group = memory(proc_root(os.environ)), cgroup(proc_root(os.environ), sys_root(os.environ)).memory
    free = [*([host.available_bytes] if host else []), *([group.left] if group else [])]
    return min(free, default=1 << 30) // max(1, ctx.place.local_world_size or 1)
