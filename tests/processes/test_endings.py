"""Runs that somebody ends, readers that leave, and what cannot be done at all."""

import os
import signal
import time

import pytest
from jobs import CHECK, Job, processes, torchrun

STANDALONE = (*CHECK, "--nproc-per-node", "2")
QUICK = ("--select", "LCH001")
# Silence after which a rank counts as lost, and a bit.
SILENCE = 9.0


def _interrupted(start, *arguments: str) -> Job:
    """A run whose rank 1 sleeps in the all-reduce."""
    job = start(*arguments, "--select", "LCH003,COL001", "--json", "{json}", DDPDIAG_TEST_FAULT="sleep 1")
    job.wait_until(job.reached.exists)
    return job


@pytest.fixture(scope="module")
def suspended(start_shared) -> tuple[Job, float]:
    """A run whose supervisors are all stopped, and since when."""
    options = ("--select", "COL001", "--budget", "600", "--json", "{json}")
    job = start_shared(*STANDALONE, *options, DDPDIAG_TEST_FAULT="slow-import *")
    job.wait_until(job.reached.exists)
    for rank in (0, 1):
        job.supervisor(rank).kill(signal.SIGSTOP)
    return job, time.monotonic()


def _check_partial(job: Job, exit_code: int, name: str) -> None:
    report = job.report
    assert report["exit_code"] == exit_code, job.told()
    assert report["verdict"] == "unknown"
    assert job.blamed == set(), "who was told to leave is to blame for nothing"
    assert name in next(finding["message"] for finding in report["findings"] if finding["code"] == "RUN004.told")
    assert next(check["statuses"] for check in report["checks"] if check["code"] == "LCH003") == {"done": 2}
    assert job.reports == 1, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


# That run stands still, while the next tests run.
@pytest.mark.usefixtures("suspended")
def test_ctrl_c_at_the_terminal_reports_what_was_seen(start):
    job = _interrupted(start, *STANDALONE)
    for rank in (0, 1):
        assert "libtorch" not in _mapped(job.supervisor(rank).pid), "who owns the deadlines has no torch"
        assert "libtorch" in _mapped(job.fork_server(rank).pid)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() == 130, job.told()
    _check_partial(job, 130, "SIGINT")


def _mapped(pid: int) -> str:
    with open(f"/proc/{pid}/maps") as maps:
        return maps.read()


@pytest.mark.deep
@pytest.mark.parametrize("arguments", [STANDALONE, (*torchrun(2), *CHECK)], ids=["started by ddpdiag", "torchrun"])
def test_signals_by_which_a_batch_system_warns_a_job_change_nothing(start, arguments):
    """Slurm sends them to every process of a step (sbatch --signal)."""
    job = start(*arguments, "--select", "LCH003,COL001", "--json", "{json}", DDPDIAG_TEST_FAULT="slow-import *")
    job.wait_until(job.reached.exists)
    launcher = {job.process.pid} if arguments is not STANDALONE else set()
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        for process in processes(job.mark):
            if process.pid not in launcher:
                process.kill(signum)
    assert job.wait() == 0, job.told()
    job.check_left_nothing()


@pytest.mark.deep
@pytest.mark.parametrize(("number", "code"), [(15, 143), pytest.param(2, 130, marks=pytest.mark.deep)])
def test_a_signal_to_the_launcher_alone_reports_what_was_seen(start, number, code):
    job = _interrupted(start, *STANDALONE)
    job.process.send_signal(number)
    assert job.wait() == code, job.told()
    _check_partial(job, code, signal.Signals(number).name)


@pytest.mark.deep
def test_ctrl_c_under_torchrun_reports_what_was_seen(start):
    job = _interrupted(start, *torchrun(2), *CHECK)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() != 0
    assert job.reports == 1, job.told()
    assert job.report["exit_code"] == 130
    assert job.blamed == set()
    job.check_left_nothing()


@pytest.mark.deep
def test_a_killed_launcher_leaves_no_process(start):
    job = _interrupted(start, *STANDALONE)
    job.process.kill()
    assert job.wait() == -signal.SIGKILL
    assert job.left_processes(30) == []
    assert job.left_files() == []


def test_ctrl_c_before_all_ranks_came_ends_the_wait(start):
    job = start(*CHECK, "--rank", "0", "--world-size", "2", "--master-addr", "127.0.0.1", "--json", "{json}")
    job.wait_until(lambda: list(job.temporary.glob("ddpdiag-*")))
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


@pytest.mark.parametrize(
    ("reads", "count"), [(True, "2"), (False, "2"), (False, "1")], ids=["after-a-line", "at-once", "one-rank"]
)
def test_a_reader_that_leaves_ends_nothing_badly(start, reads, count):
    reader, writer = os.pipe()
    if not reads:
        os.close(reader)
    job = start(*CHECK, "--nproc-per-node", count, *QUICK, "--json", "{json}", stdout=writer)
    os.close(writer)
    if reads:
        assert os.read(reader, 1)
        os.close(reader)
    assert job.wait() in (0, 128 + signal.SIGPIPE), job.told()
    assert "Broken pipe" not in job.stderr
    assert job.report["verdict"] == "fit"
    assert not job.has_traceback, job.told()
    assert "Exception ignored" not in job.stderr
    job.check_left_nothing()


def test_ranks_that_were_suspended_for_a_while_go_on_and_blame_nobody(suspended):
    job, since = suspended
    time.sleep(max(0.0, since + SILENCE - time.monotonic()))
    for process in processes(job.mark):
        process.kill(signal.SIGCONT)
    assert job.wait(600) == 0, job.told()
    assert job.report["verdict"] == "fit"
    job.check_left_nothing()
