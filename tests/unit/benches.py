"""Benchmarks made by hand: four ranks on two hosts, whose times follow latency + size / bandwidth."""

from msgspec import structs
from reports import SLOW, fit, unfit

from ddpdiag.model import Report, Verdict
from ddpdiag.model.bench import BenchRank, BenchReport, BenchRequest, BenchRow, Bottleneck, Expectation, Series

RANKS = 4
SIZES = tuple(1 << power for power in range(3, 28, 2))
LATENCY_SECONDS = {"gloo": 180e-6, "nccl": 20e-6}
BYTES_PER_S = {"gloo": 0.71e9, "nccl": 240e9}
EXPECTED = {
    "gloo": Expectation(busbw_bytes_per_s=1.3e9, source="copies in memory, measured on all ranks at once"),
    "nccl": Expectation(busbw_bytes_per_s=370.8e9, source="18 NVLinks of 20.6 GB/s, as NCCL counts them (topo.h)"),
}
FACTORS = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "all_to_all": 0.75}


def row(
    size: int, backend: str = "gloo", collective: str = "all_reduce", *, wrong: int | None = 0, **fields
) -> BenchRow:
    """A row whose slowest rank is the last one."""
    seconds = LATENCY_SECONDS[backend] + size / BYTES_PER_S[backend]
    whole = BenchRow(
        backend=backend,
        collective=collective,
        size_bytes=size,
        count=size // 4,
        dtype="float",
        seconds=seconds,
        algbw_bytes_per_s=size / seconds,
        busbw_bytes_per_s=size / seconds * FACTORS.get(collective, 1.0),
        wrong=wrong,
        calls=20,
        slowest_rank=RANKS - 1,
        min_seconds=seconds * 0.95,
        cv=0.1,
    )
    return structs.replace(whole, **fields)


def series_of(backend: str = "gloo", collective: str = "all_reduce", **fields) -> Series:
    """The result of a sweep."""
    busbw = BYTES_PER_S[backend] * FACTORS.get(collective, 1.0)
    whole = Series(
        backend=backend,
        collective=collective,
        dtype="float",
        peak_busbw_bytes_per_s=busbw * 0.98,
        best_size_bytes=SIZES[-1],
        latency_seconds=LATENCY_SECONDS[backend],
        expectation=EXPECTED[backend],
        share=busbw * 0.98 / EXPECTED[backend].busbw_bytes_per_s,
        bottleneck=Bottleneck.COPY,
        sentence="The cores that copy are the bottleneck: 82 % of what 4 ranks can copy at the same time.",
    )
    return structs.replace(whole, **fields)


def bench_rank(rank: int, backend: str = "gloo", collective: str = "all_reduce", **fields) -> BenchRank:
    """A line of the table of ranks."""
    gpu = backend == "nccl"
    size = SIZES[-1]
    seconds = (LATENCY_SECONDS[backend] + size / BYTES_PER_S[backend]) * (1 + rank / 100)
    whole = BenchRank(
        backend=backend,
        collective=collective,
        rank=rank,
        local_rank=rank % 2,
        host=f"n{rank // 2}",
        device="NVIDIA H100 80GB HBM3" if gpu else "cpu",
        gpu_uuid=f"GPU-{rank:08x}-0000-0000-0000-000000000000" if gpu else None,
        pci=f"00000000:{0x17 + rank:02X}:00.0" if gpu else None,
        pid=4711 + rank,
        device_index=rank % 2 if gpu else None,
        size_bytes=size,
        seconds=seconds,
        busbw_bytes_per_s=size / seconds * FACTORS.get(collective, 1.0),
        spread_share=0.023 + rank / 1000,
        lag_seconds=21e-6 * (rank + 1),
        copy_bytes_per_s=4.1e9 - rank * 1e8,
    )
    return structs.replace(whole, **fields)


def bench(*backends: str, collectives: tuple[str, ...] = ("all_reduce",), **fields) -> BenchReport:
    """A sweep of all sizes over each backend (gloo unless said otherwise)."""
    pairs = [(backend, collective) for backend in backends or ("gloo",) for collective in collectives]
    rows = tuple(row(size, backend, collective) for backend, collective in pairs for size in SIZES)
    whole = BenchReport(
        request=BenchRequest(maxbytes=SIZES[-1], stepfactor=4.0, backend=backends),
        rows=rows,
        series=tuple(series_of(backend, collective) for backend, collective in pairs),
        ranks=tuple(bench_rank(r, backend, collective) for backend, collective in pairs for r in range(RANKS)),
        omissions=("20 calls of 128 MiB would have taken longer than the budget: there were 7",),
        wrong=0,
        complete=True,
        sentence="all_reduce over gloo reaches 1.04 GB/s.",
        torch_version="2.13.0",
        nccl_version="2.27.5" if "nccl" in backends else None,
    )
    return structs.replace(whole, **fields)


SENTENCE = "all_reduce over gloo reaches 1.04 GB/s, 80 % of the 1.3 GB/s that these 4 ranks should."


def healthy(of: BenchReport | None = None, **fields) -> Report:
    """A benchmark in which all went well."""
    return fit(bench=of or bench(), sentence=SENTENCE, **fields)


def slow(**fields) -> Report:
    """One in which rank 3 is slow."""
    reason = "copies at 0.9 GB/s, a quarter of its peers' median (4.0 GB/s); 2 other processes use its cores"
    ranks = (*map(bench_rank, range(3)), bench_rank(3, copy_bytes_per_s=0.9e9, slow_reason=reason))
    return unfit(bench=bench(ranks=ranks), findings=(SLOW,), **fields)


def unmeasured(**fields) -> Report:
    """One that never began."""
    empty = bench(rows=(), series=(), ranks=(), omissions=(), wrong=None, complete=False)
    sentence = "The ranks never met, so nothing was measured."
    report = fit(verdict=Verdict.UNKNOWN, exit_code=3, sentence=sentence, bench=empty)
    return structs.replace(report, **fields)
