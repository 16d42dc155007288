"""One training by each launcher, in real processes."""

import signal

import pytest
from jobs import processes

COMPARE = ("-m", "ddpdiag", "train", "--compare-launchers")
# Each start has a seventh of the budget, which a busy machine may need.
SHORT = ("--steps", "6", "--budget", "170", "--json", "{json}")


def check_worked(row: dict, ranks: int) -> None:
    assert row["status"] == "works"
    assert row["start_seconds"] > 0
    assert row["step_seconds"] > 0
    assert row["threads"] == [1] * ranks


@pytest.mark.deep
def test_every_launcher_starts_the_same_training(start):
    job = start(*COMPARE, *SHORT, "--nproc-per-node", "2")
    assert job.wait(180) == 0, job.told()
    for row in job.report["rows"]:
        check_worked(row, 2)
    assert job.stderr == ""
    job.check_left_nothing()


@pytest.mark.deep
def test_a_signal_ends_all_and_what_was_measured_is_reported(start):
    job = start(*COMPARE, *SHORT, "--budget", "400", "--nproc-per-node", "1")
    # The second method; the first one is the command torchrun.
    job.wait_until(lambda: any("torch.distributed.run" in process.command for process in processes(job.mark)), 110)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(150) == 130, job.told()
    first, *others = job.report["rows"]
    check_worked(first, 1)
    assert {row["status"] for row in others} == {"not finished"}
    assert all(row["method"] in job.stdout for row in job.report["rows"]), job.told()
    job.check_left_nothing()


def test_a_process_that_was_launched_starts_nothing(start):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    job = start(*COMPARE, TORCHELASTIC_RUN_ID="none", **place)
    assert job.wait() == 2, job.told()
    (sentence,) = job.stderr.splitlines()
    assert sentence.startswith("ddpdiag: --compare-launchers ")
    assert "torchrun" in sentence
    job.check_left_nothing()
