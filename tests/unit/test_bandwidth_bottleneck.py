"""Where the bottleneck of a sweep is, and how it is reported."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.bandwidth import Bound, busbw, busbw_factor
from ddpdiag.bench.series import assess
from ddpdiag.model.bench import BenchRow, Bottleneck

MIB = 1 << 20
SIZES = tuple(8 << power for power in range(28))  # 8 B to 1 GiB
LOOPBACK = Bound(1.44e9, Bottleneck.COPY, "this host's loopback 1.6 GB/s, measured in this run")
NVLINK = Bound(352e9, Bottleneck.NVLINK, "0.95 x 371 GB/s of the GPU's NVLinks")
PCIE = Bound(24e9, Bottleneck.PCIE, "24 GB/s of PCIe")
RAILS = Bound(184e9, Bottleneck.NIC, "0.92 x 200 GB/s of 8 network cards of n0")
ONE_CARD = Bound(0.1175e9, Bottleneck.NIC, "0.94 x 125 MB/s of the network card of n0")
SLOW = {"rank 1 on n0": "copies 2.1 times slower than the median of its peers"}


def row(size: int, seconds: float, backend: str = "gloo") -> BenchRow:
    return BenchRow(
        backend=backend,
        collective="all_reduce",
        size_bytes=size,
        count=size // 4,
        dtype="float",
        seconds=seconds,
        algbw_bytes_per_s=size / seconds,
        busbw_bytes_per_s=busbw("all_reduce", size, seconds, 8),
        wrong=0,
        calls=20,
        slowest_rank=0,
        min_seconds=seconds,
        cv=0.0,
    )


def assessed(
    endless: float, bound: Bound | None, *, latency: float = 20e-6, sizes: tuple[int, ...] = SIZES, **more: Any
) -> tuple[Bottleneck, str]:
    """An all-reduce of 8 ranks along a line: bus bandwidth of an endless message, and seconds of an empty one."""
    backend = "gloo" if bound and bound.bottleneck is Bottleneck.COPY else "nccl"
    rate = endless / busbw_factor("all_reduce", 8)
    hosts = more.pop("hosts", 2 if bound and bound.bottleneck is Bottleneck.NIC else 1)
    return assess([row(size, latency + size / rate, backend) for size in sizes], bound, host_count=hosts, **more)


SWEEPS = {
    "copies of gloo": (assessed(1.31e9, LOOPBACK, latency=100e-6), Bottleneck.COPY),
    "a little more than gloo should": (assessed(1.5e9, LOOPBACK, latency=100e-6), Bottleneck.COPY),
    "NVLinks": (assessed(366e9, NVLINK), Bottleneck.NVLINK),
    "half of the NVLinks": (assessed(200e9, NVLINK), Bottleneck.UNKNOWN),
    "PCIe": (assessed(23.5e9, PCIE), Bottleneck.PCIE),
    "all rails": (assessed(180e9, RAILS), Bottleneck.NIC),
    "so little that it may be sockets": (assessed(10e9, RAILS), Bottleneck.UNKNOWN),
    "one card": (assessed(0.115e9, ONE_CARD), Bottleneck.NIC),
    "nothing known": (assessed(200e9, None), Bottleneck.UNKNOWN),
    "a network of unknown speed": (assessed(1.1e9, PCIE._replace(network_unknown=True), hosts=2), Bottleneck.UNKNOWN),
    "one large size": (assessed(1.4e9, LOOPBACK, sizes=(64 * MIB,)), Bottleneck.COPY),
    "small messages": (assessed(1.31e9, LOOPBACK, latency=120e-6, sizes=SIZES[:13]), Bottleneck.LATENCY),
    "flat": (assessed(1e15, LOOPBACK, latency=120e-6, sizes=SIZES[:18]), Bottleneck.LATENCY),
    "too short for the machine": (assessed(180e9, RAILS, latency=200e-6, sizes=SIZES[:23]), Bottleneck.UNKNOWN),
    "more ranks than cores": (assessed(0.4e9, LOOPBACK, core_shortage=(4, 2)), Bottleneck.NOT_JUDGED),
    "a slow rank comes before everything else": (
        assessed(0.4e9, LOOPBACK, core_shortage=(4, 2), slow_ranks=SLOW),
        Bottleneck.SLOW_RANK,
    ),
    "two slow ranks": (assessed(1e9, None, slow_ranks={**SLOW, "rank 5 on n1": "starts last"}), Bottleneck.SLOW_RANK),
}


@pytest.mark.parametrize(("found", "expected"), SWEEPS.values(), ids=SWEEPS)
def test_a_sweep_shows_whose_limit_was_reached_or_why_not(golden, found, expected: Bottleneck) -> None:
    assert found[0] is expected
    golden(found[1])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1 << 33), st.floats(1e-9, 1e6)), min_size=1, max_size=6),
    st.none() | st.sampled_from([LOOPBACK, NVLINK, PCIE, RAILS, PCIE._replace(busbw_bytes_per_s=0.0)]),
    st.integers(1, 3),
)
def test_any_rows_are_assessed_in_one_sentence(rows: list[tuple[int, float]], bound: Bound | None, hosts: int) -> None:
    _, sentence = assess([row(*each) for each in rows], bound, host_count=hosts)
    assert sentence.isascii()
    assert sentence.endswith(".")
