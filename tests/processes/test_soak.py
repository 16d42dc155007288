"""ddpdiag check --soak: a bit that flips once is named; a healthy soak, one that hangs, one that is ended."""

import os
import signal

import pytest
from jobs import CHECK, Job, Start

pytestmark = [pytest.mark.deep, pytest.mark.alone]


def soak(start: Start, ranks: int, seconds: int, *options: str, **variables: str) -> Job:
    words = ("--nproc-per-node", str(ranks), "--soak", f"{seconds}s", "--select", "TRN004", "--json", "{json}")
    return start(*CHECK, *words, *options, **variables)


def found(job: Job) -> dict[str, dict]:
    return {finding["code"]: finding for finding in job.report["findings"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_bit_that_flips_once_is_named(start: Start, ranks: int) -> None:
    job = soak(start, ranks, 60, DDPDIAG_TEST_FAULT="flip 1")
    assert job.wait(150) == 1, job.told()
    difference = found(job)["TRN004.differs"]
    assert difference["ranks"] == [1]
    assert (difference["evidence"]["step"], difference["evidence"]["result"]) == (100, "matrix product in float32")
    assert job.blamed == {1}
    job.check_left_nothing()


def test_a_healthy_soak_finds_nothing(start: Start) -> None:
    job = soak(start, 2, 40)
    assert job.wait(120) == 0, job.told()
    assert set(found(job)) == {"TRN004.tried"}, job.told()
    assert found(job)["TRN004.tried"]["evidence"]["seconds"] >= 39
    assert "TRN004" in " ".join(job.progress)
    job.check_left_nothing()


def test_a_rank_that_hangs_in_a_soak_is_named(start: Start) -> None:
    job = soak(start, 2, 10, "--set", "TRN004.deadline_seconds=3", DDPDIAG_TEST_FAULT="sleep 1")
    assert job.wait(90) == 1, job.told()
    assert found(job)["RUN003.hung"]["ranks"] == [1]
    job.check_left_nothing()


def test_ctrl_c_reports_what_was_tried(start: Start) -> None:
    job = soak(start, 2, 60, "--record", "run.jsonl", DDPDIAG_TEST_FAULT="flip 1")
    job.wait_until(job.reached.exists, 100)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait(120) == 130, job.told()
    assert found(job)["TRN004.tried"]["evidence"]["steps"] > 0, job.told()
    job.check_left_nothing()
