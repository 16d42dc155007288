"""Groups that take far longer than half of the others are late."""

import pytest

from ddpdiag.model import Kind, Trial
from ddpdiag.runtime.coordinator.dispatch import DispatchedTrial


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def dispatched(groups: int, clock: Clock, late_factor: float | None = 4.0) -> DispatchedTrial:
    pairs = tuple((2 * number, 2 * number + 1) for number in range(groups))
    trial = Trial(code="FAB001", groups=pairs, kind=Kind.TORCH, deadline_seconds=60, late_factor=late_factor)
    return DispatchedTrial(trial, 60, clock)


def end(own: DispatchedTrial, *groups: int) -> None:
    for group in groups:
        own.mark_done(2 * group)
        own.mark_done(2 * group + 1)


def test_nobody_is_late_before_half_of_the_groups_are_through():
    clock = Clock()
    own = dispatched(5, clock)
    clock.now += 3
    end(own, 0, 1)
    clock.now += 50
    assert not own.has_late_groups()


def test_later_than_so_many_times_what_half_of_the_groups_took_is_late():
    clock = Clock()
    own = dispatched(5, clock)
    clock.now += 1
    end(own, 0, 1)
    clock.now += 1
    end(own, 3)
    clock.now += 5.9
    assert not own.has_late_groups()
    clock.now += 0.2
    assert own.has_late_groups()


def test_half_a_group_is_none():
    clock = Clock()
    own = dispatched(2, clock)
    own.mark_done(0)
    clock.now += 50
    assert not own.has_late_groups()


def test_quick_as_others_may_be_there_are_a_few_seconds():
    clock = Clock()
    own = dispatched(4, clock)
    clock.now += 0.1
    end(own, 0, 1, 2)
    clock.now += 4.8
    assert not own.has_late_groups()
    clock.now += 0.2
    assert own.has_late_groups()


@pytest.mark.parametrize(("groups", "late_factor"), [(1, 4.0), (4, None)])
def test_one_group_has_nobody_to_be_later_than_and_most_trials_do_not_ask(groups, late_factor):
    clock = Clock()
    own = dispatched(groups, clock, late_factor)
    end(own, 0)
    clock.now += 59
    assert not own.has_late_groups()
