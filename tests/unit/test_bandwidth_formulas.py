"""Algorithm and bus bandwidth, and what a size comes to: numbers worked out by hand, and rows of nccl-tests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.bandwidth import MessageSize, algbw, busbw, busbw_factor, rounded_size
from ddpdiag.model.bench import COLLECTIVES

# The machine may be busy.

# busbw over algbw of 2, 3, 4, 8, 16 and 1024 ranks, as decimals: doc/PERFORMANCE.md worked out by hand.
RANKS = (2, 3, 4, 8, 16, 1024)
BY_HAND = {
    "all_reduce": (1.0, 1.33333, 1.5, 1.75, 1.875, 1.99805),
    "all_gather": (0.5, 0.66667, 0.75, 0.875, 0.9375, 0.999023),
    "reduce_scatter": (0.5, 0.66667, 0.75, 0.875, 0.9375, 0.999023),
    "all_to_all": (0.5, 0.66667, 0.75, 0.875, 0.9375, 0.999023),
    "broadcast": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "reduce": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "send_recv": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
}
CASES = [(name, n, share) for name, shares in BY_HAND.items() for n, share in zip(RANKS, shares, strict=True)]

collectives = st.sampled_from(COLLECTIVES)
worlds = st.integers(1, 20_000)
elements = st.sampled_from([1, 2, 4, 8, 16])
sizes = st.integers(0, 1 << 40)


@pytest.mark.parametrize(("collective", "ranks", "share"), CASES)
def test_a_known_time_gives_the_known_algbw_and_busbw(collective: str, ranks: int, share: float) -> None:
    """100 MB in 5 ms are 20 GB/s, by powers of ten."""
    assert algbw(100_000_000, 0.005) == pytest.approx(20e9, rel=1e-3)
    assert busbw(collective, 100_000_000, 0.005, ranks) == pytest.approx(20e9 * share, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "microseconds", "algbw_gb", "busbw_gb"),
    [(1048576, 27.76, 37.78, 66.11), (8388608, 81.16, 103.36, 180.88), (33554432, 195.40, 171.72, 300.51)],
)
def test_rows_that_nccl_tests_printed(size: int, microseconds: float, algbw_gb: float, busbw_gb: float) -> None:
    """all_reduce_perf on 8 GPUs, as users have published it."""
    assert algbw(size, microseconds / 1e6) / 1e9 == pytest.approx(algbw_gb, rel=1e-3)
    assert busbw("all_reduce", size, microseconds / 1e6, 8) / 1e9 == pytest.approx(busbw_gb, rel=1e-3)


def test_every_collective_has_a_number_by_hand_and_an_unknown_one_is_an_error() -> None:
    assert set(BY_HAND) == set(COLLECTIVES)
    with pytest.raises(ValueError, match="gather_all"):
        busbw_factor("gather_all", 2)


@pytest.mark.parametrize(
    ("collective", "wanted", "ranks", "expected"),
    [
        ("all_reduce", 1024, 8, MessageSize(1024, 256, 256, 256)),
        ("all_reduce", 1023, 8, MessageSize(1020, 255, 255, 255)),
        ("broadcast", 8, 3, MessageSize(8, 2, 2, 2)),
        ("reduce", 2, 2, MessageSize(4, 1, 1, 1)),
        ("send_recv", 0, 2, MessageSize(4, 1, 1, 1)),
        ("all_gather", 1024, 8, MessageSize(1024, 32, 32, 256)),
        ("reduce_scatter", 1024, 8, MessageSize(1024, 32, 256, 32)),
        ("all_to_all", 1024, 8, MessageSize(1024, 32, 256, 256)),
        # 341 bytes a rank are 85 floats, and 84 of them end at 16 bytes.
        ("all_gather", 1024, 3, MessageSize(1008, 84, 84, 252)),
        # nccl-tests would move nothing.
        ("all_gather", 8, 2, MessageSize(8, 1, 1, 2)),
        ("all_to_all", 8, 8, MessageSize(32, 1, 8, 8)),
        ("reduce_scatter", 24, 2, MessageSize(24, 3, 6, 3)),
        # As reduce_scatter_perf printed them on 8 GPUs.
        ("reduce_scatter", 128, 8, MessageSize(128, 4, 32, 4)),
        ("reduce_scatter", 512, 8, MessageSize(512, 16, 128, 16)),
    ],
)
def test_what_a_size_of_floats_comes_to(collective: str, wanted: int, ranks: int, expected: MessageSize) -> None:
    assert rounded_size(collective, wanted, 4, ranks) == expected


@settings(deadline=None)
@given(collectives, sizes, elements, worlds)
def test_buffers_are_never_empty_and_hold_the_size(collective: str, wanted: int, element: int, ranks: int) -> None:
    got = rounded_size(collective, wanted, element, ranks)
    assert min(got.count, got.send, got.receive) >= 1
    assert max(got.send, got.receive) * element == got.size_bytes
    assert rounded_size(collective, got.size_bytes, element, ranks) == got
