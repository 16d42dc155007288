"""Rank 2 of 4 fails in each way in which ranks fail; it alone is blamed, in time, and nothing stays behind."""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
from jobs import CHECK, Job, torchrun, wait_until

RANKS = 4
GUILTY = 2
# The whole run; what a trial may take is cut to what is left of it, so a hang costs this much.
BUDGET = 12
# From an exit of rank 0 to that of the launcher, and the interpreter's and torchrun's own start on a busy machine.
AROUND = 10
OPTIONS = (*CHECK, "--select", "LCH003", "--select", "COL001", "--budget", str(BUDGET), "--json", "{json}")

Launch = Callable[..., Job]


@cache
def has_shutdown_timeout() -> bool:
    """torchrun waits 30 s for a rank that ignores SIGTERM, unless it can be told otherwise (torch 2.13 can)."""
    page = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, check=True)
    return b"--shutdown-timeout" in page.stdout


@pytest.fixture(params=["standalone", "torchrun"])
def launch(request, start) -> Launch:
    """launch(fault): the faulty run, started in each of the two ways."""

    def launched(fault: str, *options: str) -> Job:
        if request.param == "standalone":
            arguments = (*OPTIONS, "--nproc-per-node", str(RANKS), *options)
        else:
            patience = ("--shutdown-timeout", "3") if has_shutdown_timeout() else ()
            arguments = (*torchrun(RANKS, *patience), *OPTIONS, *options)
        return start(*arguments, DDPDIAG_TEST_FAULT=fault)

    launched.name = request.param
    return launched


def check_blame(job: Job, launcher: str) -> None:
    """What every run with a faulty rank 2 must end with."""
    code = job.wait(BUDGET + AROUND)
    assert job.json.exists(), job.told()
    report = job.report
    assert job.blamed == {GUILTY}, job.told()
    assert report["verdict"] == "unfit"
    assert report["exit_code"] == 1
    assert report["seconds"] <= BUDGET
    assert f"rank {GUILTY}" in report["sentence"]
    assert code == 1
    assert job.reports == 1, job.told()
    assert "Traceback" not in job.stdout
    if launcher == "torchrun":
        assert report["sentence"] in job.stderr, "torchrun's own summary says why"
    assert job.left_nothing()


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        pytest.param("sleep", "RUN003.hung", "did not reach the step", id="that-sleeps"),
        pytest.param("gil", "RUN003.hung", "did not reach the step", id="that-holds-the-gil"),
        pytest.param("segv", "RUN003.died", "SIGSEGV", id="that-segfaults"),
        pytest.param("raise", "RUN003.raised", "RuntimeError: injected", id="that-raises"),
        pytest.param("import", "RUN003.hung", "import torch", id="whose-import-hangs"),
    ],
)
def test_a_rank(launch, fault, code, words):
    job = launch(f"{fault} {GUILTY}")
    check_blame(job, launch.name)
    finding = next(finding for finding in job.errors if finding["code"] == code)
    assert words in finding["message"]


def test_a_stopped_rank_is_told_from_one_that_waits(launch):
    job = launch(f"pause {GUILTY}")
    wait_until(job.reached.exists, "the all-reduce is reached")
    job.worker(GUILTY).kill(signal.SIGSTOP)
    check_blame(job, launch.name)
    finding = next(finding for finding in job.errors if finding["code"] == "RUN003.hung")
    assert finding["evidence"]["state"] == "T"
    assert "stopped" in finding["message"]


def test_a_killed_supervisor_takes_its_children_along(launch):
    job = launch(f"pause {GUILTY}")
    wait_until(job.reached.exists, "the all-reduce is reached")
    job.supervisor(GUILTY).kill(signal.SIGKILL)
    check_blame(job, launch.name)
    assert "RUN002.lost" in [finding["code"] for finding in job.errors]


def test_a_frozen_rank_0_leaves_the_others_with_their_records(launch, start):
    job = launch(f"pause {GUILTY}", "--budget", "40")
    wait_until(job.reached.exists, "the all-reduce is reached")
    job.supervisor(0).kill(signal.SIGSTOP)
    code = job.wait(35)
    assert code == (3 if launch.name == "standalone" else 1), job.told()
    assert job.left_processes() == []
    assert job.reports == 0
    records = sorted(job.temporary.glob("ddpdiag-*/rank-*.jsonl"))
    others = [path for path in records if path.name != "rank-0.jsonl"]
    assert [path.name for path in others] == ["rank-1.jsonl", "rank-2.jsonl", "rank-3.jsonl"]
    for rank, path in enumerate(others, 1):
        (sentence,) = [line for line in job.stderr.splitlines() if line.startswith(f"ddpdiag: rank {rank} ")]
        assert "lost rank 0" in sentence
        assert str(path) in sentence
    assert "Traceback" not in job.told()
    judged = start("-m", "ddpdiag", "judge", *map(str, others), "--json", "{json}")
    assert judged.wait() == 3, judged.told()
    assert judged.report["verdict"] == "unknown"
    assert not judged.blamed & {1, 3}
