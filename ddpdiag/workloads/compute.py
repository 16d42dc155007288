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
from ddpdiag.probes.gpu.health import Watched, watched
from ddpdiag.workloads.devices import describe, first_line, synchronize


class Pace(NamedTuple):
    """Seconds of the untimed products, which raise the clocks, of a batch of products, and of a batch of copies."""

    warm: float
    products: float
    copies: float


_BATCHES = 5
# The first two keep a GPU busy for less than half a second. DEEP is long enough for a hot GPU to lower its clocks.
PACES = {
    Depth.QUICK: Pace(0.08, 0.025, 0.008),
    Depth.STANDARD: Pace(0.08, 0.025, 0.008),
    Depth.DEEP: Pace(0.5, 0.8, 0.2),
}
# Rows of the largest matrices: large enough for nearly the highest rate. One product takes an H100 1.5 ms.
MOST_ROWS, MOST_ROWS_ON_CPU = 8192, 1024
# If one product of MOST_ROWS would take longer, the device gets smaller matrices. A device that takes this long has a
# sixth of the rate of a T4, the slowest card with tensor cores.
_LONGEST_SECONDS = 0.1
_PROBE_ROWS, _PROBE_ROWS_ON_CPU = 1024, 256
# Much more than any L2 cache holds (126 MB on a B200).
COPY_BYTES, COPY_BYTES_ON_CPU = 256 << 20, 32 << 20


def compute(ctx: Context, device: torch.device) -> Compute:
    """Measure the rates of products and copies on `device`; `unmeasured` is the reason if torch or cuBLAS cannot."""
    ctx.step(CONTEXT_STEP)
    about = describe(device)
    result = Compute(
        device=about.name,
        index=about.number,
        uuid=about.uuid,
        pci=about.pci,
        processors=None if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count,
        pid=os.getpid(),
    )
    here: AbstractContextManager[object] = nullcontext() if device.type == "cpu" else torch.cuda.device(device)
    with here, watched(about.uuid) as gpu, torch.no_grad():
        try:
            if reason := unusable(device):
                return structs.replace(result, unmeasured=reason)
            result = _products(ctx, device, gpu, result)
            ctx.step("copies within the memory")
            result = structs.replace(result, copy_bytes_per_s=_copies(device, PACES[ctx.options.depth].copies))
        except torch.cuda.OutOfMemoryError as error:
            return structs.replace(result, unmeasured=first_line(error))
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next trial needs this memory
        return structs.replace(result, pids=gpu.pids())


def unusable(device: torch.device) -> str:
    """The reason why the device cannot multiply at its full speed (cuBLAS does not start), or "". Starts cuBLAS."""
    if device.type != "cuda":
        return ""
    torch.zeros(1, device=device)  # creates the CUDA context, to which the handle of cuBLAS belongs
    try:
        torch.cuda.current_blas_handle()
    except RuntimeError as error:
        if "CUBLAS_STATUS" not in str(error):
            raise  # an error of CUDA about the GPU
        return f"cuBLAS does not start ({first_line(error)})"
    return ""


def _products(ctx: Context, device: torch.device, gpu: Watched, result: Compute) -> Compute:
    """Add the rate of each batch of products and the GPU's load in it, after untimed products that raise the clocks."""
    # Tensor cores multiply bf16 from Ampere on.
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    name = str(dtype).removeprefix("torch.")
    pace, during = PACES[ctx.options.depth], list[GpuLoad | None]()
    ctx.step(f"{CONTEXT_STEP}: first product in {name}")
    size = _rows(device, dtype)
    left, right = (torch.rand((size, size), dtype=dtype, device=device).sub_(0.5) for _ in range(2))
    product = left @ right

    def multiply() -> object:
        return torch.mm(left, right, out=product)

    synchronize(device)
    ctx.step(f"products in {name}")
    one = _seconds(device, 1, multiply)
    _seconds(device, _calls(pace.warm, one), multiply)
    calls = _calls(pace.products, one)
    spent = [_seconds(device, calls, multiply, lambda: during.append(gpu.load())) for _ in range(_BATCHES)]
    rates = tuple(2 * size**3 * calls / max(seconds, 1e-9) for seconds in spent)
    return structs.replace(result, dtype=name, flop_per_s=rates, during=tuple(filter(None, during)))


def _rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows of the largest matrices whose product takes at most _LONGEST_SECONDS, estimated from a small product."""
    probe = _PROBE_ROWS if device.type == "cuda" else _PROBE_ROWS_ON_CPU
    some = torch.rand((probe, probe), dtype=dtype, device=device)
    _seconds(device, 1, lambda: some @ some)  # loads the kernels
    one = _seconds(device, 2, lambda: some @ some) / 2
    rows = MOST_ROWS if device.type == "cuda" else MOST_ROWS_ON_CPU
    while rows > probe and one * (rows / probe) ** 3 > _LONGEST_SECONDS:
        rows //= 2
    return rows


def _copies(device: torch.device, batch_seconds: float) -> tuple[float, ...]:
    """The rate of each batch of copies within the device's memory, in bytes read and written per second."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES_ON_CPU
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls = _calls(batch_seconds, _seconds(device, 1, lambda: target.copy_(source)))
    spent = [_seconds(device, calls, lambda: target.copy_(source)) for _ in range(_BATCHES)]
    return tuple(2 * size * calls / max(seconds, 1e-9) for seconds in spent)


def _seconds(
    device: torch.device, calls: int, work: Callable[[], object], during: Callable[[], object] = lambda: None
) -> float:
    """Seconds of `calls` calls of `work` on the device. `during` is called once while a GPU works, never on a CPU."""
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
    during()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _calls(seconds: float, one: float) -> int:
    return max(1, min(10_000, round(seconds / max(one, 1e-9))))
