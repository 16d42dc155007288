"""A worker that is stopped, or stuck in the kernel, is ended long before its deadline; any other one has until then."""

import pytest
from msgspec import structs
from test_first_use import TRIAL, running

from ddpdiag.model import ProcessState
from ddpdiag.runtime.deadlines import DEADLINES

LONG = structs.replace(TRIAL, deadline_seconds=60)


def ended_after(
    state: str, *, step: str = "training step 5 of 56", seconds: float = 30.0, every: float = 0.5, runs: bool = False
) -> float | None:
    """When a worker is stuck that is in this state at each look, and `runs` on a core in between."""
    own = running(LONG)
    own.worker.page.write(5, step)
    for look in range(1, int(seconds / every) + 1):
        if own.is_stuck(ProcessState(pid=7, state=state), look * 0.001 if runs else 1.5, 100.0 + look * every):
            return look * every
    return None


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_worker_that_is_stopped_or_stuck_is_decided_after_10_s(state: str) -> None:
    seconds = ended_after(state)
    assert seconds is not None
    assert DEADLINES.stuck_worker <= seconds <= DEADLINES.stuck_worker + 1


@pytest.mark.parametrize("state", ["R", "S", "Z"])
def test_a_worker_that_runs_or_waits_has_until_its_deadline(state: str) -> None:
    assert ended_after(state) is None


def test_a_slow_disk_is_not_stuck_as_long_as_its_reader_gets_a_core_in_between() -> None:
    assert ended_after("D", runs=True) is None


@pytest.mark.parametrize(("state", "ends"), [("D", False), ("T", True)])
def test_in_a_first_use_a_worker_may_wait_for_the_driver_but_not_be_stopped(state: str, ends: bool) -> None:
    assert (ended_after(state, step="communicator") is not None) is ends


def test_a_new_step_begins_anew() -> None:
    own = running(LONG)
    for look in range(1, 40):
        own.worker.page.write(look // 10, "training step")
        assert not own.is_stuck(ProcessState(pid=7, state="D"), 1.5, 100.0 + look * 0.5)


def test_a_job_that_was_stopped_as_a_whole_is_not_stuck() -> None:
    """Its supervisors did not look meanwhile, and a worker is woken a moment after its supervisor."""
    own = running(LONG)
    stopped, slept = ProcessState(pid=7, state="T"), ProcessState(pid=7, state="S")
    looks = [(100.5, slept), (101.0, stopped), (3700.0, stopped), (3700.5, stopped), (3701.0, slept)]
    assert not any(own.is_stuck(process, 1.5, now) for now, process in looks)
    assert ended_after("T", every=3.0) is None
