"""Run one trial of the benchmark on one rank: a sweep, and copies within the memory of the rank's CPU or GPU."""

import os
import time

import torch
import torch.distributed as dist
from msgspec import structs

from ddpdiag.bandwidth import busbw
from ddpdiag.bench.data import Data
from ddpdiag.bench.workloads.sweep import SweepContext, sweep
from ddpdiag.model.bench import BenchRequest, RankRow
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import memory, proc_root, sys_root
from ddpdiag.probes.host.limits import Copier, affinity, cgroup, loopback_bytes_per_s
from ddpdiag.text import rate_text, size_text
from ddpdiag.workloads.devices import link_limits, synchronize

# A CPU's loopback rate and copy rate are measured in 250 ms. Copies between the rows show whether a rank stays slow.
_LOOPBACK_SECONDS = 0.2
_COPY_SECONDS = 0.05
_MOMENT_SECONDS = 0.02
_ROWS_PER_MOMENT = 2
_MOMENTS_AT_END = 4
# Smaller copies within a GPU's memory are too short to be timed.
_GPU_COPY_BYTES = 256 << 20
# Time before the trial's end for closing the group and sending the result.
_SHUTDOWN_SECONDS = 2.0
# The least time between reports. Each sends all rows (300 bytes each) again to rank 0, which measures meanwhile.
_REPORT_SECONDS = 0.5
_REPORT_SECONDS_PER_ROW = 300 / 5e6


def run_benchmark(ctx: Context, empty_data: Data, device: torch.device, seconds: float) -> Data:
    """Run a sweep within `seconds`, and copies in between. Reports its progress; returns `empty_data` with results."""
    # The sweep ends before the trial's deadline.
    end = min(ctx.end - _SHUTDOWN_SECONDS, time.monotonic() + seconds)
    ctx.step("measure this rank's own limits")
    copy_meter = _CopyMeter(device)
    # The barriers let all ranks measure at the same time, as they copy at the same time in a collective.
    dist.barrier()
    copy_rate = copy_meter.measure(_COPY_SECONDS)
    dist.barrier()
    loopback = loopback_bytes_per_s(_LOOPBACK_SECONDS) if device.type != "cuda" else None
    limits = structs.replace(
        link_limits(device), copy_bytes_per_s=copy_rate, loopback_bytes_per_s=loopback, cores=len(affinity()) or None
    )
    rows: list[RankRow] = []
    reported_at = row_began_at = time.monotonic()

    def on_row(row: RankRow) -> None:
        nonlocal reported_at, row_began_at
        rows.append(row)
        if len(rows) % _ROWS_PER_MOMENT == 0:
            copy_meter.measure(_MOMENT_SECONDS)
        now, interval = time.monotonic(), _REPORT_SECONDS + len(rows) * len(ctx.group) * _REPORT_SECONDS_PER_ROW
        # The next size is expected to take twice as long as this one; without a report, this row would be shown after
        # it. All ranks report the same rows, because a row is shown when all have reported it.
        is_due = torch.tensor(int(now - reported_at + 2 * (now - row_began_at) > interval), device=device)
        dist.all_reduce(is_due, op=dist.ReduceOp.MAX)
        row_began_at = time.monotonic()
        if is_due.item():
            reported_at = row_began_at
            rates = tuple(copy_meter.rates)
            partial = structs.replace(empty_data, rows=tuple(rows), copy_rates=rates, limits=limits, is_complete=False)
            rate = busbw(empty_data.collective, row.size_bytes, row.median_seconds, empty_data.rank_count)
            subject = f"{empty_data.collective} {empty_data.backend} {size_text(row.size_bytes)}"
            ctx.report(partial, f"{subject}: {rate_text(rate)}")

    request, free_bytes = ctx.options.bench or BenchRequest(), _free_bytes(ctx, device)
    context = SweepContext(request, empty_data.collective, device, free_bytes, end, ctx.step, on_row)
    data = sweep(context, empty_data)
    for _ in range(_MOMENTS_AT_END):
        ctx.step("copy in this rank's own memory")
        dist.barrier()
        copy_meter.measure(_MOMENT_SECONDS)
    return structs.replace(data, copy_rates=tuple(copy_meter.rates), limits=limits)


class _CopyMeter:
    """Measures how fast this rank copies within the memory of its CPU or GPU. `rates` are all results, in bytes/s."""

    def __init__(self, device: torch.device) -> None:
        self.rates: list[float] = []
        self._device = device
        if device.type == "cuda":
            self._source = torch.zeros(_GPU_COPY_BYTES, dtype=torch.uint8, device=device)
            self._target = torch.zeros_like(self._source)
        else:
            self._copier = Copier()

    def measure(self, seconds: float) -> float:
        """Measure the rate in bytes per second, and add it to `rates`. A CPU copies for `seconds`, a GPU only once."""
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
    """The free bytes of this rank's GPU, or for a CPU the rank's equal share of what its host and cgroup have free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host, group = memory(proc_root(os.environ)), cgroup(proc_root(os.environ), sys_root(os.environ)).memory
    free_sizes = [*([host.available_bytes] if host else []), *([group.unused] if group else [])]
    return min(free_sizes, default=1 << 30) // max(1, ctx.place.local_world_size or 1)
