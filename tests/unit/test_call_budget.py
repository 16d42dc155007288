"""How many calls there is time for."""

import pytest

from ddpdiag.model.bench import BenchRequest

sweep = pytest.importorskip("ddpdiag.bench.workloads.sweep", reason="needs torch", exc_type=ModuleNotFoundError)


@pytest.mark.parametrize(
    ("seconds", "left", "time_share", "calls"),
    [(1e-3, 1000.0, 1.0, (5, 20)), (1.0, 15.0, 1.0, (3, 12)), (1e-3, 100.0, 1e-7, (5, 20)), (1.0, 0.0, 1.0, (0, 0))],
    ids=["what fits", "slow", "large sizes ahead", "no time"],
)
def test_calls_are_as_many_as_requested_or_as_there_is_time_for(seconds, left, time_share, calls):
    assert sweep.affordable_calls(BenchRequest(), seconds, left, time_share) == calls


@pytest.mark.parametrize(
    ("size", "last", "left", "has_time"),
    [
        (1 << 40, None, 10.0, True),
        (4 << 20, (1 << 20, 0.1), 10.0, True),
        (1 << 30, (1 << 20, 0.1), 10.0, False),
        (8, (1 << 20, 0.5), 1.0, False),
    ],
    ids=["nothing known", "fits", "too large", "a smaller one is not quicker"],
)
def test_a_size_is_not_begun_that_would_not_end(size, last, left, has_time):
    assert sweep.has_time(size, last, left) is has_time
