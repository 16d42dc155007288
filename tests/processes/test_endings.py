"""Runs that somebody ends, readers that leave, and what cannot be done at all."""

import os
import signal
import time

import pytest
from jobs import CHECK, Job, processes, torchrun

STANDALONE = (*CHECK, "--nproc-per-node", "2")
QUICK = ("--select", "LCH001")


def _interrupted(start, *arguments: str) -> Job:
    """A run whose rank 1 sleeps in the all-reduce."""
    options = ("--select", "LCH003", "--select", "COL001", "--json", "{json}")
    job = start(*arguments, *options, DDPDIAG_TEST_FAULT="sleep 1")
    job.wait_until(job.reached.exists)
    return job


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


@pytest.mark.parametrize("group", [True, False], ids=["at-the-terminal", "to-the-launcher-alone"])
def test_ctrl_c_reports_what_was_seen(start, group):
    job = _interrupted(start, *STANDALONE)
    if group:
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.told()
    _check_partial(job, 130, "SIGINT")


def test_ctrl_c_under_torchrun_reports_what_was_seen(start):
    job = _interrupted(start, *torchrun(2), *CHECK)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() != 0
    assert job.reports == 1, job.told()
    assert job.report["exit_code"] == 130
    assert job.blamed == set()
    job.check_left_nothing()


def test_sigterm_reports_what_was_seen(start):
    job = _interrupted(start, *STANDALONE)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.told()
    _check_partial(job, 143, "SIGTERM")


def test_a_killed_launcher_leaves_no_process(start):
    job = _interrupted(start, *STANDALONE)
    job.process.kill()
    assert job.wait() == -signal.SIGKILL
    assert job.left_processes(10) == []
    assert job.left_files() == []


def test_a_killed_rank_0_is_told_and_the_others_keep_their_records(start):
    job = _interrupted(start, *STANDALONE)
    job.supervisor(0).kill(signal.SIGKILL)
    assert job.wait(25) == 3, job.told()
    assert job.left_processes() == []
    assert "rank 0" in job.stderr, "a run that ends without a report says why"
    assert not job.has_traceback, job.told()
    (folder,) = job.temporary.glob("ddpdiag-*")
    assert str(folder / "rank-1.jsonl") in job.stderr
    assert {path.name for path in folder.iterdir()} <= {"rank-0.jsonl", "rank-1.jsonl"}


def test_ctrl_c_before_all_ranks_came_ends_the_wait(start):
    job = start(*CHECK, "--rank", "0", "--world-size", "2", "--master-addr", "127.0.0.1", "--json", "{json}")
    job.wait_until(lambda: list(job.temporary.glob("ddpdiag-*")))
    job.process.send_signal(signal.SIGINT)
    assert job.wait(12) == 130, job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


@pytest.mark.parametrize("reads", [True, False], ids=["after-a-line", "at-once"])
def test_a_reader_that_leaves_ends_nothing_badly(start, reads):
    reader, writer = os.pipe()
    if not reads:
        os.close(reader)
    job = start(*STANDALONE, *QUICK, "--json", "{json}", stdout=writer)
    os.close(writer)
    if reads:
        assert os.read(reader, 1)
        os.close(reader)
    assert job.wait() in (0, 128 + signal.SIGPIPE), job.told()
    assert job.report["verdict"] == "fit"
    assert not job.has_traceback, job.told()
    assert "Exception ignored" not in job.stderr
    job.check_left_nothing()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--stage", "nosuch"), "nosuch"),
        (("--select", "NOSUCH1"), "NOSUCH1"),
        (("--set", "NOSUCH.x=1"), "NOSUCH"),
        (("--json", "nosuch/report.json"), "nosuch"),
        (("--json", "."), "."),
        (("--record", "nosuch/run.jsonl"), "nosuch"),
        (("--shared-dir", "nosuch"), "nosuch"),
        (("--depth", "abysmal"), "abysmal"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_starts(start, options, word):
    job = start(*STANDALONE, *options)
    assert job.wait(10) == 2, job.told()
    assert job.stdout == ""
    assert not job.has_traceback, job.told()
    (sentence,) = [line for line in job.stderr.splitlines() if line.startswith("ddpdiag: ")]
    assert word in sentence
    job.check_left_nothing()


def test_a_corrupt_data_folder_is_a_finding(start, tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (folder / name).write_bytes(b"\x00\x00\x08\x03not what it says")
    job = start(*STANDALONE, "--select", "TRN001", "--data-dir", str(folder), "--json", "{json}")
    assert job.wait() == 1, job.told()
    assert job.report["verdict"] == "unfit"
    assert any(str(folder) in finding["message"] for finding in job.errors), job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_ranks_that_were_suspended_for_a_while_go_on_and_blame_nobody(start):
    job = start(*STANDALONE, "--json", "{json}")
    job.wait_until(lambda: len(processes(job.mark)) >= 7)
    supervisors = [job.supervisor(rank) for rank in (0, 1)]
    for process in supervisors:
        process.kill(signal.SIGSTOP)
    time.sleep(9)  # longer than the silence after which a rank counts as lost
    for process in supervisors:
        process.kill(signal.SIGCONT)
    assert job.wait() == 0, job.told()
    assert job.report["verdict"] == "fit"
    job.check_left_nothing()


def test_supervisors_hold_no_torch_and_nurseries_do(start):
    job = _interrupted(start, *STANDALONE)
    for rank in (0, 1):
        assert "libtorch" not in _mapped(job.supervisor(rank).pid)
        assert "libtorch" in _mapped(job.nursery(rank).pid)
    job.process.send_signal(signal.SIGTERM)
    job.wait()


def _mapped(pid: int) -> str:
    with open(f"/proc/{pid}/maps") as maps:
        return maps.read()
