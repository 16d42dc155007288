"""How many calls there is time for."""

import time

import pytest

from ddpdiag.model.bench import Bench

calls = pytest.importorskip("ddpdiag.bench.workloads.calls", reason="needs torch", exc_type=ModuleNotFoundError)
CallBudget = calls.CallBudget


def budget(seconds: float, modes: int = 2, **bench: int) -> CallBudget:
    return CallBudget(Bench(**bench), time.monotonic() + seconds, modes)


def test_what_fits_is_called_as_often_as_asked():
    assert budget(1000).calls(1e-3, 1) == (5, 20)


def test_a_slow_call_is_made_less_often_and_warms_up_less():
    warmup, calls = budget(30).calls(1.0, 1)
    assert 0 <= warmup < calls < 20
    # 30 s for two modes of calls of 1 s.
    assert 2 * (warmup + calls) <= 30


def test_small_sizes_do_not_go_short_because_large_ones_lie_ahead():
    assert budget(100).calls(1e-3, 1e7) == (5, 20)


def test_no_time_is_no_call():
    assert budget(0).calls(1.0, 1) == (0, 0)


def test_a_size_is_not_begun_that_would_not_end():
    known = budget(10)
    assert known.has_time(1 << 40)  # nothing is known yet
    known.took(1 << 20, 0.1)
    assert known.has_time(4 << 20)
    assert not known.has_time(1 << 30)


def test_a_latency_tells_of_sizes_near_to_it_only():
    known = budget(10)
    assert not known.knows(8)
    known.took(1 << 10, 1e-4)
    assert known.knows(1 << 16)
    assert not known.knows(1 << 30)
    known.took(1 << 20, 1e-3)
    assert known.knows(1 << 30)


def test_a_smaller_size_is_not_expected_to_be_quicker():
    known = budget(1)
    known.took(1 << 20, 0.5)
    assert not known.has_time(8)
