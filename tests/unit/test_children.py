"""The parts of worker handling that need no process."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from seen import arrival_of

from ddpdiag.model import Kind, ProcessState, Trial
from ddpdiag.probes.host.kernel import process_state
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.runtime.single_rank import SingleRank
from ddpdiag.runtime.supervisor.ipc import StepPage, Task
from ddpdiag.runtime.supervisor.processes import Child, describe_end, is_alive
from ddpdiag.runtime.supervisor.supervisor import _describe_survivor


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
    golden(*(describe_end(code) for code in (-11, 3, None, -63)))


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


def runner() -> SingleRank:
    return SingleRank(arrival_of(0, 1), with_torch=False)


def test_a_process_without_a_gpu_that_outlives_its_kill_is_a_survivor_at_once() -> None:
    assert runner()._kill(StuckChild(gpu=False))


def test_one_that_held_a_gpu_is_given_the_time_that_the_driver_may_need() -> None:
    own, child = runner(), StuckChild(gpu=True)
    assert not own._kill(child)
    assert own._take_overdue() == ()
    child.killed_at = time.monotonic() - DEADLINES.kill_gpu - 1
    assert [(process.pid, process.survived) for process in own._take_overdue()] == [(4711, True)]
    assert own._take_overdue() == (), "told once"


def test_one_that_held_a_gpu_and_ended_is_no_survivor() -> None:
    own, child = runner(), StuckChild(gpu=True, killed_ago=DEADLINES.kill_gpu + 1)
    own._kill(child)
    child.ends = True
    assert own._take_overdue() == ()
    assert own.kill_workers() == []


class FakeWorker:
    """Keeps what it is sent."""

    pid, start_step, cannot_start = 4712, None, False

    def __init__(self) -> None:
        self.page, self.log, self.tasks = StepPage.create(), SimpleNamespace(size=lambda: 0), []

    def send(self, task: Task) -> bool:
        self.tasks.append(task)
        return True


class FakeRunner(SingleRank):
    """Has a fake worker for every trial."""

    def worker_for(self, _trial: Trial) -> FakeWorker:  # type: ignore[override]
        self.worker = FakeWorker()
        return self.worker

    def ending_for(self, kind: Kind) -> tuple[int, ...]:
        """The killed workers that a trial of this kind is told of."""
        number = self._last_trial_number + 1
        self.start(Trial(code="COL001", groups=((0,),), kind=kind, deadline_seconds=5, number=number))
        return self.worker.tasks[0].ending


def test_the_next_worker_of_a_gpu_is_told_which_process_may_still_hold_it() -> None:
    own, child = FakeRunner(arrival_of(0, 1), with_torch=False), StuckChild(gpu=True)
    own._kill(child)
    assert own.ending_for(Kind.TORCH) == (4711,)
    assert own.ending_for(Kind.PLAIN) == ()
    child.ends = True
    assert own.ending_for(Kind.TORCH) == ()


def test_one_that_cannot_be_killed_is_not_waited_for() -> None:
    own, child = FakeRunner(arrival_of(0, 1), with_torch=False), StuckChild(gpu=True)
    own._kill(child)
    child.killed_at = time.monotonic() - DEADLINES.kill_gpu - 1
    assert own.ending_for(Kind.TORCH) == ()


MAIN_THREAD_ENDS = """
import ctypes, os, threading, time
threading.Thread(target=lambda: (print(flush=True), time.sleep(20))).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call exit is x86-64's")
def test_a_process_of_which_a_thread_is_left_has_not_ended() -> None:
    """It is shown as a zombie, and still has its files open: a GPU that a thread is stuck in is not free."""
    with subprocess.Popen([sys.executable, "-c", MAIN_THREAD_ENDS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: process_state(process.pid)[0] == "Z")
        assert is_alive(process.pid)
        process.kill()
        wait_until(lambda: not is_alive(process.pid))
    assert process.returncode is not None


def test_at_the_end_of_a_run_it_is_said_that_it_may_still_end(golden) -> None:
    soon, late = StuckChild(gpu=True, killed_ago=2), StuckChild(gpu=True, killed_ago=60)
    golden(_describe_survivor(soon), _describe_survivor(late), _describe_survivor(StuckChild(gpu=False)))
