"""`ddpdiag allreduce-bench`: nccl-tests' options into data, then a run whose only measurement is the benchmark."""

import math
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from ddpdiag.bench.options import COLLECTIVES, DTYPES, OPS, BenchOptions, BenchOutputs
from ddpdiag.cli import check
from ddpdiag.cli.check import check_backend, refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckOptions, LaunchOptions, split
from ddpdiag.codec import readable
from ddpdiag.comparison.benchmarks import read_baseline
from ddpdiag.errors import UsageError, nearest
from ddpdiag.model.bench import Average, BaselineSeries, Bench, Blocking
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.sanitize import words_without_secrets

E = TypeVar("E", bound=Enum)

# Membership, versions, cores, the benchmark, and what happened to the run.
CODES = ("LCH", "HST001", "COL002", "RUN")
_ALIASES = {
    "int": "int32",
    "fp16": "half",
    "float16": "half",
    "fp32": "float",
    "float32": "float",
    "fp64": "double",
    "float64": "double",
    "bf16": "bfloat16",
}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_SIZES = 1000
_MOST_DIGITS = 9
# With -I every call of every rank is kept.
_MOST_TIMES = 50_000


def run(launch: LaunchOptions, flags: BenchOptions, outputs: BenchOutputs) -> int:
    """Take part in a benchmark, or start one on this host; the exit code."""
    bench = bench_of(flags, outputs.save_baseline)
    # The run's backend is the last one, which a job would use; gloo is there for comparison.
    backend = readable(split(flags.backend)[-1]).lower()
    options = CheckOptions(select=CODES, backend=backend, budget=flags.timeout)
    return check.run(launch, options, outputs, bench=bench)


def bench_of(flags: BenchOptions, save_baseline: str | None = None) -> Callable[[Launch], Bench]:
    """What the flags ask for; UsageError for a value that makes no sense, before anything is started."""
    low, high = size("-b", flags.minbytes), size("-e", flags.maxbytes)
    if low > high:
        raise UsageError(
            f"-b {flags.minbytes} is above -e {flags.maxbytes}: expected the smallest size, then the largest"
        )
    if flags.ngpus != 1:
        raise UsageError(
            f"-g {flags.ngpus}: one process drives one GPU; start {flags.ngpus} of them: --nproc-per-node {flags.ngpus}"
        )
    step = None if flags.stepbytes is None else size("-i", flags.stepbytes)
    if step is not None and flags.stepfactor is not None:
        raise UsageError("-i and -f exclude each other: sizes grow by a step, or by a factor")
    factor = 2.0 if flags.stepfactor is None else flags.stepfactor
    if not (math.isfinite(factor) and factor > 1):
        raise UsageError(f"-f {factor:g}: expected a factor above 1, by which each size is larger than the one before")
    backends = _names("--backend", flags.backend, None)
    for backend in backends:
        check_backend(backend)
    if "auto" in backends and len(backends) > 1:
        raise UsageError("--backend auto cannot be combined with others: it is the backend that a job would use")
    for backend in backends:
        refuse_nccl_without_gpus(backend)

    def bench(launch: Launch) -> Bench:
        return Bench(
            collectives=_names("--collective", flags.collective, COLLECTIVES),
            backends=() if backends == ("auto",) else backends,
            min_bytes=low,
            max_bytes=high,
            step_bytes=step,
            factor=factor,
            iterations=_number("-n", flags.iters, 1),
            warmup=_number("-w", flags.warmup_iters, 0),
            aggregate=_number("-m", flags.agg_iters, 1),
            cycles=_number("-N", flags.run_cycles, 0),
            # dtypes as nccl-tests calls them: torch's names are taken, too.
            dtypes=_names("-d", [_ALIASES.get(n.lower(), n) for n in split(flags.datatype)], (*DTYPES, "all")),
            ops=_names("-o", flags.op, (*OPS, "all")),
            roots=(_root(flags.root, launch),),
            average=_member("-a", flags.average, Average),
            checks=_number("-c", flags.check, 0),
            blocking=None if flags.blocking is None else _member("-z", flags.blocking, Blocking),
            per_iteration=bool(flags.per_iter_timing),
            min_busbw_bytes_per_s=_positive("--min-busbw", flags.min_busbw),
            baseline=_baseline(flags.baseline, save_baseline, launch),
            args=words_without_secrets([readable(word) for word in sys.argv]),
        )

    _check_count((high - low) // step + 1 if step else int(math.log(high / low) / math.log(factor)) + 1, flags)
    return bench


def _check_count(sizes: int, flags: BenchOptions) -> None:
    """UsageError for more sizes, or more calls that are kept, than a report may have."""
    if sizes > _MOST_SIZES:
        raise UsageError(
            f"-b {flags.minbytes} -e {flags.maxbytes}: that is {sizes:,} sizes; at most {_MOST_SIZES} expected"
        )
    kinds = len(OPS if "all" in flags.op else flags.op) * len(DTYPES if "all" in flags.datatype else flags.datatype)
    calls = sizes * flags.iters * 2 * kinds * max(1, flags.run_cycles)
    if flags.per_iter_timing and calls > _MOST_TIMES:
        raise UsageError(f"-I 1 keeps every call, {calls:,} of each rank; at most {_MOST_TIMES:,} expected")


def size(option: str, text: str) -> int:
    """Bytes in "8", "128M" or "1.5G"; K, M, G and T are powers of 1024, as in nccl-tests."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        value = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1 <= value < 1 << 50):
        raise UsageError(f"{option} {text}: expected a number of bytes, 1 or more, such as 8, 64K, 128M or 1G")
    return int(value)


def _names(option: str, values: Sequence[str], known: Sequence[str] | None) -> tuple[str, ...]:
    """Comma-separated names, each once; UsageError for one that is not known."""
    names = tuple(dict.fromkeys(readable(name).lower() for name in split(values)))
    for name in names:
        if not name or (known is not None and name not in known):
            raise UsageError(f"{option} {name}: expected {', '.join(known or ('a name',))}{nearest(name, known or ())}")
    return names


def _number(option: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{option} {value}: expected {least} or more")
    return value


def _positive(option: str, gigabytes: float | None) -> float | None:
    """Bytes per second of GB/s."""
    if gigabytes is None:
        return None
    if not (math.isfinite(gigabytes) and gigabytes > 0):
        raise UsageError(f"{option} {gigabytes:g}: expected GB/s (1e9 bytes per second), above 0")
    return gigabytes * 1e9


def _member(option: str, value: int, kind: type[E]) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{each.value} ({each.name.lower().replace('_', ' ')})" for each in kind)
        raise UsageError(f"{option} {value}: expected {known}") from None


def _root(text: str, launch: Launch) -> int:
    """A rank, or -1 for "all"."""
    if text == "all":
        return -1
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) >= launch.place.world_size:
        raise UsageError(f"-r {text}: expected a rank from 0 to {launch.place.world_size - 1}, or all")
    return int(text)


def _baseline(path: str | None, save_baseline: str | None, launch: Launch) -> tuple[BaselineSeries, ...] | None:
    """What rank 0 compares with. The first run that keeps its own past has none."""
    if path is None or launch.place.rank != 0:
        return None
    return read_baseline("--baseline", path, missing=() if path == save_baseline else None) or None
