"""The rates at which one device multiplies matrices in half precision and copies within its memory."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from msgspec import structs

from ddpdiag.model import Depth
from ddpdiag.model.measurements import Compute, GpuLoad
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.probes.gpu.health import GpuMonitor, gpu_monitor
from ddpdiag.workloads.devices import describe, first_line, synchronize


class Durations(NamedTuple):
    """Intended seconds: of the untimed products that raise the clocks, of a batch of products, of a batch of copies."""

    warmup: float
    products: float
    copies: float


_BATCHES = 5
# QUICK and STANDARD keep a GPU busy for less than half a second. DEEP is long enough for a hot GPU to lower its clocks.
DURATIONS = {
    Depth.QUICK: Durations(0.08, 0.025, 0.008),
    Depth.STANDARD: Durations(0.08, 0.025, 0.008),
    Depth.DEEP: Durations(0.5, 0.8, 0.2),
}
# Rows of the largest matrices, which reach nearly the highest rate. One product takes an H100 1.5 ms.
MAX_ROWS, MAX_ROWS_ON_CPU = 8192, 1024
# If one product of MAX_ROWS would take longer, the device gets smaller matrices. A device that takes this long has a
# sixth of the rate of a T4, the slowest card with tensor cores.
_MAX_PRODUCT_SECONDS = 0.1
_PROBE_ROWS, _PROBE_ROWS_ON_CPU = 1024, 256
# Much more than any L2 cache holds (126 MB on a B200).
COPY_BYTES, COPY_BYTES_ON_CPU = 256 << 20, 32 << 20


def measure_rates(ctx: Context, device: torch.device) -> Compute:
    """Measure the rates of products and copies. If cuBLAS fails or memory is full, `why_unmeasured` is the reason."""
    ctx.step(CONTEXT_STEP)
    description = describe(device)
    result = Compute(
        device=description.name,
        index=description.gpu_index,
        uuid=description.uuid,
        pci=description.pci,
        processors=None if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count,
        pid=os.getpid(),
    )
    on_device: AbstractContextManager[object] = nullcontext() if device.type == "cpu" else torch.cuda.device(device)
    with on_device, gpu_monitor(description.uuid) as watched_gpu, torch.no_grad():
        try:
            if reason := start_cublas(device):
                return structs.replace(result, why_unmeasured=reason)
            result = _add_product_rates(ctx, device, watched_gpu, result)
            ctx.step("copies within the memory")
            result = structs.replace(result, copy_bytes_per_s=_copy_rates(device, DURATIONS[ctx.options.depth].copies))
        except torch.cuda.OutOfMemoryError as error:
            return structs.replace(result, why_unmeasured=first_line(error))
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next trial needs this memory
        return structs.replace(result, pids=watched_gpu.pids())


def start_cublas(device: torch.device) -> str:
    """Start cuBLAS, which a GPU needs for fast products. Returns cuBLAS's error or "". Raises errors of CUDA."""
    if device.type != "cuda":
        return ""
    torch.zeros(1, device=device)  # creates the CUDA context, to which the handle of cuBLAS belongs
    try:
        torch.cuda.current_blas_handle()
    except RuntimeError as error:
        if "CUBLAS_STATUS" not in str(error):
            raise  # CUDA's error, which is about the GPU
        return f"cuBLAS does not start ({first_line(error)})"
    return ""


def _add_product_rates(ctx: Context, device: torch.device, gpu: GpuMonitor, result: Compute) -> Compute:
    """Return `result` with the rate of each batch of products, and the GPU's load during each batch."""
    # Tensor cores multiply bf16 from Ampere on.
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    name = str(dtype).removeprefix("torch.")
    durations, loads = DURATIONS[ctx.options.depth], list[GpuLoad | None]()
    ctx.step(f"{CONTEXT_STEP}: first product in {name}")
    size = _choose_rows(device, dtype)
    left, right = (torch.rand((size, size), dtype=dtype, device=device).sub_(0.5) for _ in range(2))
    product = left @ right

    def multiply() -> object:
        return torch.mm(left, right, out=product)

    synchronize(device)
    ctx.step(f"products in {name}")
    call_seconds = _time_calls(device, 1, multiply)
    _time_calls(device, _call_count(durations.warmup, call_seconds), multiply)
    calls = _call_count(durations.products, call_seconds)
    batch_seconds = [_time_calls(device, calls, multiply, lambda: loads.append(gpu.load())) for _ in range(_BATCHES)]
    rates = tuple(2 * size**3 * calls / max(seconds, 1e-9) for seconds in batch_seconds)
    return structs.replace(result, dtype=name, flop_per_s=rates, loads=tuple(filter(None, loads)))


def _choose_rows(device: torch.device, dtype: torch.dtype) -> int:
    """The rows of square matrices whose product takes at most _MAX_PRODUCT_SECONDS, estimated from a small product."""
    probe_rows = _PROBE_ROWS if device.type == "cuda" else _PROBE_ROWS_ON_CPU
    matrix = torch.rand((probe_rows, probe_rows), dtype=dtype, device=device)
    _time_calls(device, 1, lambda: matrix @ matrix)  # loads the kernels
    probe_seconds = _time_calls(device, 2, lambda: matrix @ matrix) / 2
    rows = MAX_ROWS if device.type == "cuda" else MAX_ROWS_ON_CPU
    while rows > probe_rows and probe_seconds * (rows / probe_rows) ** 3 > _MAX_PRODUCT_SECONDS:
        rows //= 2
    return rows


def _copy_rates(device: torch.device, target_seconds: float) -> tuple[float, ...]:
    """Run batches of copies within the device's memory: the rate of each, in bytes read and written per second."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES_ON_CPU
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls = _call_count(target_seconds, _time_calls(device, 1, lambda: target.copy_(source)))
    batch_seconds = [_time_calls(device, calls, lambda: target.copy_(source)) for _ in range(_BATCHES)]
    return tuple(2 * size * calls / max(seconds, 1e-9) for seconds in batch_seconds)


def _time_calls(
    device: torch.device, calls: int, work: Callable[[], object], while_busy: Callable[[], object] = lambda: None
) -> float:
    """Run `work` `calls` times, and return the total seconds. Calls `while_busy` once while a GPU works."""
    synchronize(device)
    if device.type != "cuda":
        begin_seconds = time.perf_counter()
        for _ in range(calls):
            work()
        return time.perf_counter() - begin_seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    while_busy()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _call_count(seconds: float, call_seconds: float) -> int:
    return max(1, min(10_000, round(seconds / max(call_seconds, 1e-9))))
