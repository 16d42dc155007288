"""Latency and bandwidth of a sweep."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.bandwidth import factor
from ddpdiag.bench.bottleneck import fit
from ddpdiag.model.bench import COLLECTIVES

# The machine may be busy.
relaxed = settings(deadline=None)

SIZES = tuple(8 << power for power in range(25))  # 8 B to 128 MiB


def line(latency: float, bandwidth: float, sizes: tuple[int, ...] = SIZES) -> list[tuple[int, float]]:
    return [(size, latency + size / bandwidth) for size in sizes]


latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e7, 1e12)


@relaxed
@given(st.sampled_from(COLLECTIVES), st.integers(2, 1024), latencies, st.floats(1e8, 1e11))
def test_an_exact_line_is_found_again(collective: str, ranks: int, latency: float, bandwidth: float) -> None:
    found = fit(collective, ranks, line(latency, bandwidth))
    assert found is not None
    assert found.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert found.busbw_bytes_per_s == pytest.approx(bandwidth * factor(collective, ranks), rel=1e-3)
    assert found.half_bytes == pytest.approx(latency * bandwidth, rel=2e-3)


@relaxed
@given(latencies, bandwidths, st.integers(0, 2**32))
def test_noise_that_only_adds_leaves_the_order_of_magnitude(latency: float, bandwidth: float, seed: int) -> None:
    random = Random(seed)
    noisy = [(size, seconds * random.uniform(1, 1.3)) for size, seconds in line(latency, bandwidth)]
    found = fit("broadcast", 2, noisy)
    if found is not None and 64 < latency * bandwidth < SIZES[-1] / 8:
        assert latency / 1.5 <= found.latency_seconds <= latency * 2
        assert bandwidth / 2.5 <= found.busbw_bytes_per_s <= bandwidth * 2.5


def test_a_disturbed_size_does_not_turn_the_slope_around() -> None:
    points = line(100e-6, 1e9)
    points[-2] = (points[-2][0], points[-1][1] * 1.1)
    found = fit("broadcast", 2, points)
    assert found is not None
    assert found.busbw_bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_the_shortest_time_of_a_size_counts_and_order_does_not() -> None:
    points = line(1e-4, 1e9)
    assert fit("reduce", 2, [(size, 2 * t) for size, t in points] + points[::-1]) == fit("reduce", 2, points)


@pytest.mark.parametrize(
    "points",
    [
        [],
        line(1e-4, 1e9, (8, 1 << 20)),
        line(1e-4, 1e9, (1 << 10, 1 << 11, 1 << 12)),
        line(1e-4, 1e9, (1 << 20, 1 << 24, 1 << 28)),
        [(size, 1e-4) for size in SIZES],
        [(0, 1.0), (8, 0.0), (1 << 20, float("nan")), (1 << 24, float("inf"))],
    ],
    ids=["nothing", "two sizes", "narrow", "only large", "flat", "no times"],
)
def test_a_sweep_that_cannot_tell_has_no_fit(points: list[tuple[int, float]]) -> None:
    assert fit("all_reduce", 2, points) is None


def test_one_rank_has_no_fit() -> None:
    assert fit("all_reduce", 1, line(1e-4, 1e9)) is None


@relaxed
@given(
    st.sampled_from(COLLECTIVES),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(-5, 1 << 33), st.floats()), max_size=12),
)
def test_any_points_are_read(collective: str, ranks: int, points: list[tuple[int, float]]) -> None:
    found = fit(collective, ranks, points)
    assert found is None or (found.latency_seconds >= 0 and found.busbw_bytes_per_s >= 0)
