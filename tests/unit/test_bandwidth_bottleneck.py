"""Where the bottleneck of a sweep is, and how it is told."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.bandwidth import Bound, busbw, factor
from ddpdiag.bench.bottleneck import Facts, Slow, assess, fit
from ddpdiag.model.bench import COLLECTIVES, Bottleneck, Fit

# The machine may be busy.
relaxed = settings(deadline=None)

MIB = 1 << 20
SIZES = tuple(8 << power for power in range(28))  # 8 B to 1 GiB
LOOPBACK = Bound(1.44e9, Bottleneck.COPY, "this host's loopback 1.6 GB/s, measured in this run")
NVLINK = Bound(352e9, Bottleneck.NVLINK, "0.95 x 371 GB/s of the GPU's NVLinks")
PCIE = Bound(24e9, Bottleneck.PCIE, "24 GB/s of PCIe")
RAILS = Bound(184e9, Bottleneck.NIC, "0.92 x 200 GB/s of 8 network cards of n0", cards=8)
ONE_CARD = Bound(0.1175e9, Bottleneck.NIC, "0.94 x 125 MB/s of the network card of n0", cards=1)


def facts(
    endless: float, bound: Bound | None, *, latency: float = 20e-6, sizes: tuple[int, ...] = SIZES, **more: Any
) -> Facts:
    """An all-reduce of 8 ranks along a line: bus bandwidth of an endless message, and seconds of an empty one."""
    backend = more.pop("backend", "gloo" if bound and bound.part is Bottleneck.COPY else "nccl")
    rate = endless / factor("all_reduce", 8)
    points = more.pop("points", [(size, latency + size / rate) for size in sizes])
    peak, best = max((busbw("all_reduce", size, seconds, 8), size) for size, seconds in points)
    found = Facts(
        collective="all_reduce",
        backend=backend,
        ranks=8,
        hosts=2 if bound and bound.part is Bottleneck.NIC else 1,
        peak_busbw_bytes_per_s=peak,
        best_bytes=best,
        fit=fit("all_reduce", 8, points),
        bound=bound,
        points=points,
    )
    return found._replace(**more)


def told(found: Facts) -> str:
    return assess(found)[1]


def part(found: Facts) -> Bottleneck:
    return assess(found)[0]


def test_the_end_of_the_caches_is_no_congestion() -> None:
    found = facts(1.31e9, LOOPBACK)
    slower = [(size, seconds * (1.3 if size > 64 * MIB else 1)) for size, seconds in found.points]
    assert part(found._replace(points=slower)) is Bottleneck.COPY


PLATEAUS = {
    "copies of gloo": (facts(1.31e9, LOOPBACK, latency=100e-6), Bottleneck.COPY),
    "a little more than gloo should": (facts(1.5e9, LOOPBACK, latency=100e-6), Bottleneck.COPY),
    "NVLinks": (facts(366e9, NVLINK), Bottleneck.NVLINK),
    "half of the NVLinks": (facts(200e9, NVLINK), Bottleneck.UNKNOWN),
    "PCIe": (facts(23.5e9, PCIE), Bottleneck.PCIE),
    "all rails": (facts(180e9, RAILS), Bottleneck.NIC),
    "so little that it may be sockets": (facts(10e9, RAILS), Bottleneck.UNKNOWN),
    "one card": (facts(0.115e9, ONE_CARD), Bottleneck.NIC),
    "nothing known": (facts(200e9, None), Bottleneck.UNKNOWN),
}


@pytest.mark.parametrize(("found", "expected"), PLATEAUS.values(), ids=PLATEAUS)
def test_a_plateau_shows_whose_limit_was_reached(golden, found: Facts, expected: Bottleneck) -> None:
    assert part(found) is expected
    golden(told(found))


def test_a_network_of_unknown_speed_is_not_blamed_on_pcie(golden) -> None:
    found = facts(1.1e9, PCIE._replace(network_unknown=True), hosts=2)
    assert part(found) is Bottleneck.UNKNOWN
    golden(told(found))


def test_bandwidth_that_falls_as_messages_grow_is_congestion_from_a_twentieth_on(golden) -> None:
    found = facts(180e9, RAILS)
    for slower, expected in ((1.03, Bottleneck.NIC), (1.1, Bottleneck.CONGESTION)):
        dropped = [(size, seconds * (slower if size == SIZES[-1] else 1)) for size, seconds in found.points]
        assert part(found._replace(points=dropped)) is expected
        golden(told(found._replace(points=dropped)))


SLOW = Slow(1, "n0", "copies 2.1 times slower than the median of its peers")
SWEEPS = {
    "small messages": (facts(1.31e9, LOOPBACK, latency=120e-6, sizes=SIZES[:13]), Bottleneck.LATENCY),
    "flat, so without a fit": (
        facts(1e9, LOOPBACK, points=[(size, 120e-6) for size in SIZES[:18]]),
        Bottleneck.LATENCY,
    ),
    "too short for the machine": (facts(180e9, RAILS, latency=200e-6, sizes=SIZES[:24]), Bottleneck.LATENCY),
    "more ranks than cores": (facts(0.4e9, LOOPBACK, oversubscribed=(4, 2)), Bottleneck.NOT_JUDGED),
    "one rank": (facts(1e9, None, ranks=1), Bottleneck.NOT_JUDGED),
    "a slow rank comes before everything else": (
        facts(0.4e9, LOOPBACK, oversubscribed=(4, 2), slow=(SLOW,)),
        Bottleneck.SLOW_RANK,
    ),
    "two slow ranks": (facts(1e9, None, slow=(SLOW, Slow(5, "n1", "comes last"))), Bottleneck.SLOW_RANK),
    "not measured": (
        facts(1e9, None)._replace(points=(), fit=None, peak_busbw_bytes_per_s=0.0),
        Bottleneck.UNKNOWN,
    ),
}


@pytest.mark.parametrize(("found", "expected"), SWEEPS.values(), ids=SWEEPS)
def test_a_sweep_that_shows_no_plateau_says_why(golden, found: Facts, expected: Bottleneck) -> None:
    assert part(found) is expected
    golden(told(found))


def test_one_large_size_is_judged_by_its_bandwidth() -> None:
    assert part(facts(1.4e9, LOOPBACK, sizes=(64 * MIB,))) is Bottleneck.COPY


numbers = st.floats() | st.sampled_from([0.0, 1.0, 1e9])
bounds = st.builds(
    Bound,
    numbers,
    st.sampled_from([Bottleneck.COPY, Bottleneck.NIC, Bottleneck.PCIE, Bottleneck.NVLINK]),
    st.just("source"),
    st.integers(0, 16),
    st.booleans(),
)
fits = st.builds(Fit, latency_seconds=numbers, busbw_bytes_per_s=numbers, half_bytes=numbers)


@relaxed
@given(
    st.builds(
        Facts,
        collective=st.sampled_from(COLLECTIVES),
        backend=st.sampled_from(["gloo", "nccl", "mpi"]),
        ranks=st.integers(0, 9),
        hosts=st.integers(0, 3),
        peak_busbw_bytes_per_s=numbers,
        best_bytes=st.integers(0, 1 << 40),
        fit=st.none() | fits,
        bound=st.none() | bounds,
        points=st.lists(st.tuples(st.integers(-1, 1 << 33), numbers), max_size=6),
        oversubscribed=st.none(),
        slow=st.just(()),
    )
)
def test_any_facts_are_told_in_one_sentence(found: Facts) -> None:
    _, sentence = assess(found)
    assert sentence.isascii()
    assert sentence.endswith(".")
