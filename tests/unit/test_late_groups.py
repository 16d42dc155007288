"""Groups that take far longer than half of the others are late."""

import pytest

from ddpdiag.model import Kind, Trial
from ddpdiag.runtime.coordinator.dispatch import DispatchedTrial

# The number of groups, the factor, and what happens: seconds that pass, and groups or ranks ("r0") that end.
LATE = {
    "before half of the groups have ended": (5, 4.0, [3, (0, 1), 50], False),
    "earlier than four times the half": (5, 4.0, [1, (0, 1), 1, (3,), 5.9], False),
    "later than four times the half": (5, 4.0, [1, (0, 1), 1, (3,), 6.1], True),
    "half of a group": (2, 4.0, ["r0", 50], False),
    "others are quick, within a few seconds": (4, 4.0, [0.1, (0, 1, 2), 4.8], False),
    "others are quick": (4, 4.0, [0.1, (0, 1, 2), 5.0], True),
    "one group": (1, 4.0, [(0,), 59], False),
    "a trial that does not ask": (4, None, [(0,), 59], False),
}


@pytest.mark.parametrize(("groups", "late_factor", "course", "is_late"), LATE.values(), ids=LATE)
def test_groups_that_take_far_longer_than_half_of_the_others_are_late(groups, late_factor, course, is_late):
    now = 100.0
    pairs = tuple((2 * number, 2 * number + 1) for number in range(groups))
    trial = Trial(code="FAB001", groups=pairs, kind=Kind.TORCH, deadline_seconds=60, late_factor=late_factor)
    own = DispatchedTrial(trial, 60, lambda: now)
    for event in course:
        match event:
            case int() | float():
                now += event
            case str():
                own.mark_done(int(event[1:]))
            case ended:
                for group in ended:
                    own.mark_done(2 * group)
                    own.mark_done(2 * group + 1)
    assert own.has_late_groups() is is_late
