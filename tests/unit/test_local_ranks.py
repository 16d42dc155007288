"""How one process ends that started all ranks of its host."""

import signal

import pytest

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.runtime.local_ranks import combined

KILLED = -signal.SIGKILL


def test_rank_0_knows_the_verdict() -> None:
    assert combined({0: 0, 1: KILLED}) == ExitCode.FIT


def test_without_rank_0_here_the_worst_counts() -> None:
    assert combined({4: 0, 5: 3}) == ExitCode.UNKNOWN


def test_when_rank_0_was_killed_the_verdict_of_the_others_counts() -> None:
    assert combined({0: KILLED, 1: 1, 2: 1}) == ExitCode.UNFIT


def test_who_was_killed_too_or_came_too_late_for_the_verdict_does_not_change_it() -> None:
    assert combined({0: KILLED, 1: 1, 2: KILLED, 3: 3}) == ExitCode.UNFIT


def test_when_nobody_made_a_report_without_rank_0_that_is_told() -> None:
    for others in ({1: 3, 2: 3}, {1: KILLED}, {}):
        with pytest.raises(RunLost, match="rank 0 was lost"):
            combined({0: KILLED, **others})
