"""How one process ends that started all ranks of its host."""

import signal

import pytest

from ddpdiag.errors import ExitCode, RunLost
from ddpdiag.runtime.run import combined_exit_code

KILLED = -signal.SIGKILL


def test_rank_0_knows_the_verdict_and_without_it_here_the_worst_counts() -> None:
    assert combined_exit_code({0: 0, 1: KILLED}) == ExitCode.FIT
    assert combined_exit_code({4: 0, 5: 3}) == ExitCode.UNKNOWN


def test_without_rank_0_there_is_no_report() -> None:
    for others in ({1: 1, 2: 1}, {1: 3, 2: 3}, {1: KILLED}, {}):
        with pytest.raises(RunLost, match="rank 0 was lost"):
            combined_exit_code({0: KILLED, **others})
