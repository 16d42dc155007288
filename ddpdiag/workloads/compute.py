"""The rates at which one device multiplies matrices and copies its memory, and whether the products are right.

The factors are the same on every device: multiples of 1/128 between -1 and 1, made from the position by integer
arithmetic. They fit 8 bits, so that fp16, bf16 and TensorFloat-32 hold them exactly, and what differs from the product
in fp64 comes from adding up and from rounding the result. First products load kernels and raise the clocks; they are
not measured.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from msgspec import structs

from ddpdiag.model import Depth
from ddpdiag.model.measurements import Compute, Gemm, GpuLoad
from ddpdiag.model.trial import CONTEXT_STEP, Context
from ddpdiag.probes.gpu.health import Watched, watched
from ddpdiag.workloads.devices import describe, first_line, synchronize
from ddpdiag.workloads.proof import without_tf32


class Pace(NamedTuple):
    """Seconds of warm products, and of each of `batches` batches of products in half precision, in single precision,
    and of copies."""

    warm: float
    half: float
    single: float
    copies: float
    batches: int = 5


# With the checks of the products, less than half a second of a GPU. Deep is long enough for heat to show.
PACES = {
    Depth.QUICK: Pace(0.08, 0.025, 0.015, 0.008),
    Depth.STANDARD: Pace(0.08, 0.025, 0.015, 0.008),
    Depth.DEEP: Pace(0.5, 0.8, 0.4, 0.2),
}
# Rows of the largest matrices: large enough for nearly the highest rate, and 1.5 ms of an H100 in bf16, 3 ms in fp32.
MOST_HALF, MOST_SINGLE, MOST_ON_CPU = 8192, 4096, 1024
# A device on which one product of that size would take longer gets smaller ones: a sixth of a T4, the slowest card with
# tensor cores.
_LONGEST_SECONDS = 0.1
_PROBE, _PROBE_ON_CPU = 1024, 256
# Much more than any L2 cache holds (126 MB on a B200).
COPY_BYTES, COPY_BYTES_ON_CPU = 256 << 20, 32 << 20
# Rows of a product that are computed again in fp64.
_ROWS = 16
_CHUNK = 1024
_WORD_BYTES = 4
# Signed forms of odd 32-bit constants (Knuth's 2654435761, MurmurHash3's), so that multiplying is one to one.
_SPREAD, _MIX = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)
# Tensor cores add in fp32 and cut off (Fasi, Higham, Mikaitis, Pranesh, PeerJ CS 7:e330, 2021): twice fp32's rounding.
_ADDING = 2.0**-23
# Unit roundoff of the result: half of the distance between 1 and the next number.
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def compute(ctx: Context, device: torch.device) -> Compute:
    """Measure this device; `unmeasured` says what torch or cuBLAS cannot do here."""
    ctx.step(CONTEXT_STEP)
    about = describe(device)
    known = Compute(
        device=about.name,
        torch=str(torch.__version__),
        index=about.number,
        uuid=about.uuid,
        pci=about.pci,
        processors=None if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count,
        pid=os.getpid(),
    )
    here: AbstractContextManager[object] = nullcontext() if device.type == "cpu" else torch.cuda.device(device)
    with here, watched(about.uuid) as gpu, torch.no_grad(), without_tf32():
        known = structs.replace(known, driver=gpu.driver)
        try:
            if reason := unusable(device):
                return structs.replace(known, unmeasured=reason)
            found = _Bench(ctx, device, gpu, known, PACES[ctx.options.depth]).measured()
        except torch.cuda.OutOfMemoryError as error:
            return structs.replace(known, unmeasured=first_line(error))
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what this needed is the next trial's
        return structs.replace(found, pids=gpu.pids())


def unusable(device: torch.device) -> str:
    """The reason why the device cannot multiply at its own speed (no cuBLAS), or nothing."""
    if device.type != "cuda":
        return ""
    torch.zeros(1, device=device)  # makes the context, which the handle belongs to
    try:
        torch.cuda.current_blas_handle()
    except RuntimeError as error:
        if "CUBLAS_STATUS" not in str(error):
            raise  # what CUDA itself says of the GPU
        return f"cuBLAS does not start ({first_line(error)})"
    return ""


class _Bench(NamedTuple):
    ctx: Context
    device: torch.device
    gpu: Watched
    known: Compute
    pace: Pace

    def measured(self) -> Compute:
        """Products in half and in single precision, and copies."""
        on_cpu, pace, during = self.device.type == "cpu", self.pace, list[GpuLoad]()
        half = torch.bfloat16 if on_cpu or torch.cuda.get_device_capability(self.device) >= (8, 0) else torch.float16
        gemms = (
            self._gemm(half, MOST_ON_CPU if on_cpu else MOST_HALF, pace.half, warm=pace.warm, during=during),
            self._gemm(torch.float32, MOST_ON_CPU if on_cpu else MOST_SINGLE, pace.single),
        )
        count = (COPY_BYTES_ON_CPU if on_cpu else COPY_BYTES) // _WORD_BYTES
        rates, wrong = self._copies(count)
        return structs.replace(
            self.known,
            gemms=gemms,
            copy_bytes=count * _WORD_BYTES,
            copy_bytes_per_s=rates,
            wrong_words=wrong,
            during=tuple(during),
        )

    def _gemm(
        self,
        dtype: torch.dtype,
        most: int,
        seconds: float,
        *,
        warm: float = 0.0,
        during: list[GpuLoad] | None = None,
    ) -> Gemm:
        """Batches of so many seconds, after `warm` seconds that raise the clocks."""
        name = str(dtype).removeprefix("torch.")
        self.ctx.step(f"{CONTEXT_STEP}: first product in {name}")
        size = self._size(dtype, most)
        left, right = (factor(size, number, dtype, self.device) for number in range(2))
        product = left @ right
        synchronize(self.device)
        self.ctx.step(f"products in {name}")
        one = self._seconds(1, lambda: torch.mm(left, right, out=product))
        self._seconds(_calls(warm, one), lambda: torch.mm(left, right, out=product))
        calls = _calls(seconds, one)
        spent = [
            self._seconds(calls, lambda: torch.mm(left, right, out=product), during) for _ in range(self.pace.batches)
        ]
        wrong, error = deviation(left, right, product)
        return Gemm(
            dtype=name,
            size=size,
            flop_per_s=tuple(2 * size**3 * calls / max(own, 1e-9) for own in spent),
            compared=len(rows_of(product)) * size,
            wrong=wrong,
            error=error,
        )

    def _size(self, dtype: torch.dtype, most: int) -> int:
        """Rows of the largest matrices up to `most` that do not take too long, going by small ones."""
        probe = _PROBE if self.device.type == "cuda" else _PROBE_ON_CPU
        left, right = (factor(probe, number, dtype, self.device) for number in range(2))
        self._seconds(1, lambda: left @ right)  # loads the kernels
        one = self._seconds(2, lambda: left @ right) / 2
        size = most
        while size > probe and one * (size / probe) ** 3 > _LONGEST_SECONDS:
            size //= 2
        return size

    def _copies(self, count: int) -> tuple[tuple[float, ...], int]:
        """Rates of copies of so many words within the device's memory, and words that are wrong after the last one."""
        self.ctx.step("copies within the memory")
        source = torch.arange(count, dtype=torch.int32, device=self.device).mul_(_SPREAD)
        target = source.bitwise_not()  # no word is what it should become
        one = self._seconds(1, lambda: target.copy_(source))
        calls = _calls(self.pace.copies, one)
        spent = [self._seconds(calls, lambda: target.copy_(source)) for _ in range(self.pace.batches)]
        moved = 2 * count * _WORD_BYTES * calls
        return tuple(moved / max(own, 1e-9) for own in spent), int((source != target).sum())

    def _seconds(self, calls: int, work: Callable[[], object], loads: list[GpuLoad] | None = None) -> float:
        """Seconds of so many calls on the device; meanwhile its load is added to `loads`."""
        synchronize(self.device)
        if self.device.type != "cuda":
            begin_seconds = time.perf_counter()
            for _ in range(calls):
                work()
            return time.perf_counter() - begin_seconds
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                work()
            end.record()
            if loads is not None and (load := self.gpu.load()) is not None:
                loads.append(load)
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _calls(seconds: float, one: float) -> int:
    return max(1, min(10_000, round(seconds / max(one, 1e-9))))


def factor(size: int, number: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Factor `number` of a product [size, size]: the same on every device."""
    result = torch.empty((size, size), dtype=dtype, device=device)
    for start in range(0, size, _CHUNK):
        rows = result[start : start + _CHUNK]
        begin = (number * size + start) * size
        words = torch.arange(begin, begin + rows.numel(), dtype=torch.int32, device=device)
        # MurmurHash3's last steps; a shift of a signed number spreads its sign, which mixes as well.
        words = words.mul_(_SPREAD)
        words = words.bitwise_xor_(words >> 16).mul_(_MIX)
        words = words.bitwise_xor_(words >> 13)
        rows.copy_((words.bitwise_and_(0xFF).sub_(0x80).to(torch.float32) / 0x80).view(rows.shape))
    return result


def rows_of(product: torch.Tensor) -> Sequence[int]:
    """The rows that are computed again."""
    return range(0, len(product), max(1, len(product) // _ROWS))[:_ROWS]


def deviation(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> tuple[int, float | None]:
    """The number of elements of some rows that deviate from fp64 by more than rounding can, and the largest deviation
    as a multiple of that (None: no number).

    Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 3.5: |fl(AB) - AB| <= n u |A||B| in whatever
    order is added up; |A||B| is at most the product of the norms of row and column. Rounding the result adds its own.
    """
    rows = list(rows_of(product))
    some = left[rows].double()
    adding = len(left) * _ADDING * some.norm(dim=1, keepdim=True)
    wrong, worst = 0, 0.0
    for start in range(0, len(right), _CHUNK):
        columns = slice(start, start + _CHUNK)
        part = right[:, columns].double()
        exact = some @ part
        allowed = adding * part.norm(dim=0, keepdim=True) + _ROUNDING[product.dtype] * exact.abs()
        share = (product[rows, columns].double() - exact).abs() / allowed.clamp_min(1e-300)
        share = share.nan_to_num(nan=math.inf, posinf=math.inf)
        wrong, worst = wrong + int((share > 1).sum()), max(worst, float(share.max()))
    return wrong, worst if math.isfinite(worst) else None
