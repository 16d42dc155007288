"""The parts of worker handling that need no process."""

import time

from seen import arrival_of

from ddpdiag.model import ProcessState
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.single_rank import OwnRank
from ddpdiag.runtime.supervisor.ipc import StepPage
from ddpdiag.runtime.supervisor.processes import Child, how_it_ended
from ddpdiag.runtime.supervisor.supervisor import _survivor


def test_a_step_page_is_read_as_it_was_written() -> None:
    page = StepPage.create()
    assert page.read() == (0, "")
    page.write(7, "all_reduce 4 B: wait")
    page.write(8, "ü" * 200)
    step, label = page.read()
    assert step == 8
    assert label.startswith("üüü")
    page.close()


def test_exit_codes_are_put_in_words(golden) -> None:
    golden(*(how_it_ended(code) for code in (-11, 3, None, -63)))


# Processes that do not end at once ------------------------------------------------------------------------------------


class StuckChild(Child):
    """A process that was killed so many seconds ago, and is still there."""

    def __init__(self, *, gpu: bool, killed_ago: float = 0.0) -> None:
        super().__init__(4711)
        self.held_gpu, self.killed_at = gpu, time.monotonic() - killed_ago
        self.ends = False

    def kill(self) -> bool:
        return False

    def is_gone(self) -> bool:
        return self.ends

    def state(self) -> ProcessState:
        return ProcessState(pid=4711, state="D", wchan="nvidia_close")


def runner() -> OwnRank:
    return OwnRank(arrival_of(0, 1), with_torch=False)


def test_a_process_without_a_gpu_that_outlives_its_kill_is_a_survivor_at_once() -> None:
    assert runner()._kill(StuckChild(gpu=False))


def test_one_that_held_a_gpu_is_given_the_time_that_the_driver_may_need() -> None:
    own, child = runner(), StuckChild(gpu=True)
    assert not own._kill(child)
    assert own._overdue() == ()
    child.killed_at = time.monotonic() - DEADLINES.kill_gpu - 1
    assert [(process.pid, process.survived) for process in own._overdue()] == [(4711, True)]
    assert own._overdue() == (), "told once"


def test_one_that_held_a_gpu_and_ended_is_no_survivor() -> None:
    own, child = runner(), StuckChild(gpu=True, killed_ago=DEADLINES.kill_gpu + 1)
    own._kill(child)
    child.ends = True
    assert own._overdue() == ()
    assert own.kill_workers() == []


def test_at_the_end_of_a_run_it_is_said_that_it_may_still_end(golden) -> None:
    soon, late = StuckChild(gpu=True, killed_ago=2), StuckChild(gpu=True, killed_ago=60)
    golden(_survivor(soon), _survivor(late), _survivor(StuckChild(gpu=False)))
