"""Benchmarks of two runs: the curves that are comparable, and losses beyond noise."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag.bandwidth import busbw
from ddpdiag.comparison import find, worst_loss
from ddpdiag.model.bench import BenchCurve, BenchPoint

# The machine may be busy.
relaxed = settings(deadline=None)

SIZES = tuple(8 << power for power in range(24))


def curve(
    latency: float = 1e-4, bandwidth: float = 1e9, *, cv: float = 0.01, sizes: tuple[int, ...] = SIZES, **more: Any
) -> BenchCurve:
    """An all-reduce of 2 ranks along a line."""
    points = tuple(
        BenchPoint(size_bytes=size, busbw_bytes_per_s=busbw("all_reduce", size, latency + size / bandwidth, 2), cv=cv)
        for size in sizes
    )
    kind = {"collective": "all_reduce", "backend": "gloo", "dtype": "float"}
    plain = BenchCurve(**kind, fabric={"devices": "AMD EPYC"}, points=points)
    return structs.replace(plain, **more)


def test_the_curve_of_the_same_kind_is_found_among_others() -> None:
    wanted = curve()
    assert find([curve(backend="nccl"), wanted, curve(dtype="half")], curve(2e-4)) == wanted


@pytest.mark.parametrize(
    "old",
    [
        [curve(fabric={"devices": "Xeon", "network": "10 Gbit/s"})],
        [curve(collective="broadcast")],
        [],
        [curve(sizes=SIZES[10:])],
    ],
    ids=["other hardware", "another collective", "no benchmark", "other sizes"],
)
def test_the_reason_why_curves_are_not_comparable(golden, old: list[BenchCurve]) -> None:
    reason = find(old, curve(sizes=SIZES[:10]))
    assert isinstance(reason, str)
    golden(reason)


def test_one_large_size_is_enough_to_compare() -> None:
    assert find([curve()], curve(sizes=(*SIZES[:3], SIZES[-1]))) == curve()
    assert find([curve(sizes=())], curve()) == curve(sizes=())
    assert isinstance(find([curve()], curve(sizes=())), str)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({}, {"bandwidth": 0.96e9}),
        ({}, {"bandwidth": 0.8e9, "cv": 0.2}),
        ({"cv": 0.2}, {"bandwidth": 0.8e9}),
        ({}, {"latency": 1.08e-4}),
        ({}, {"latency": 1.5e-4, "cv": 0.3}),
        ({}, {"bandwidth": 0.5e9, "sizes": (7, 9)}),
    ],
    ids=["equal", "4 %", "new spread", "old spread", "latency 8 %", "latency", "no common size"],
)
def test_what_is_within_noise_is_no_loss(old: dict[str, Any], new: dict[str, Any]) -> None:
    loss = worst_loss(curve(**old), curve(**new))
    assert loss is None


def test_a_tenth_less_bandwidth_is_a_loss_at_large_sizes_only() -> None:
    loss = worst_loss(curve(), curve(bandwidth=0.9e9))
    assert loss is not None
    was, now = loss
    assert was.size_bytes == now.size_bytes >= 64 << 10
    assert now.busbw_bytes_per_s == pytest.approx(0.9 * was.busbw_bytes_per_s, rel=0.01)
    assert worst_loss(curve(cv=0.2), curve(bandwidth=0.5e9)) is not None


@relaxed
@given(
    st.lists(st.tuples(st.integers(-1, 4), st.floats(), st.floats()), max_size=6),
    st.lists(st.tuples(st.integers(-1, 4), st.floats(), st.floats()), max_size=6),
)
def test_any_points_are_compared(old: list[Any], new: list[Any]) -> None:
    was, now = (
        curve(points=tuple(BenchPoint(size_bytes=s, busbw_bytes_per_s=rate, cv=cv) for s, rate, cv in points))
        for points in (old, new)
    )
    loss = worst_loss(was, now)
    assert loss is None or loss[1].busbw_bytes_per_s < loss[0].busbw_bytes_per_s
    find([was], now)
