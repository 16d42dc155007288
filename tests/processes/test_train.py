"""Strategies, in real processes: all agree with one process alone, and what is wrong or hangs is told."""

import pytest
from jobs import Job, torchrun

TRAIN = ("-m", "ddpdiag", "train", "--json", "{json}")
# dp cannot be had without GPUs; fsdp cuts the parameters.
SOME, ALL = ("dp", "ddp", "fsdp"), ("dp", "ddp", "fsdp", "tensor-parallel", "pipeline", "model-parallel")


def rows(job: Job) -> dict[str, dict]:
    return {row["strategy"]: row for row in job.report["train"]["rows"]}


@pytest.mark.parametrize("strategies", [SOME, pytest.param(ALL, marks=pytest.mark.deep)], ids=["some", "all"])
def test_strategies_train_what_one_process_trains(start, tmp_path, strategies):
    record = str(tmp_path / "run.jsonl")
    several = ("--strategy", ",".join(strategies), "--steps", "6", "--record", record)
    job = start(*TRAIN, "--nproc-per-node", "2", *several)
    assert job.wait(120) == 0, job.told()
    found = rows(job)
    assert list(found) == ["single", *strategies]
    assert found.pop("dp")["status"] == "not possible here"
    for strategy, row in found.items():
        assert row["status"] == "works", job.told()
        assert row["samples_per_second"] > 0
        assert strategy == "single" or row["deviation"] < 1e-4
    # Half of the parameters, but for what the parts do not share evenly.
    assert found["fsdp"]["state_bytes"] < 0.6 * found["ddp"]["state_bytes"]
    assert not job.has_traceback, job.told()
    job.check_left_nothing()
    again = start("-m", "ddpdiag", "judge", record)
    assert again.wait() == 0, again.told()
    assert again.stdout == job.stdout


@pytest.mark.deep
def test_a_rank_that_begins_with_other_weights_is_named(start):
    job = start(*torchrun(3), *TRAIN, "--strategy", "ddp,fsdp", "--steps", "6", DDPDIAG_TEST_FAULT="weights 1")
    assert job.wait(120) == 1, job.told()
    # DistributedDataParallel sends rank 0's weights to all, fully_shard does not.
    assert [row["status"] for row in rows(job).values()] == ["works", "works", "wrong"], job.told()
    (found,) = [finding for finding in job.report["findings"] if finding["severity"] == "error"]
    assert (found["code"], found["ranks"]) == ("TRN002.wrong", [1])


@pytest.mark.deep
def test_a_hang_is_an_answer(start):
    short = ("--steps", "6", "--set", "TRN002.deadline_seconds=12")
    job = start(*torchrun(2), *TRAIN, "--strategy", "ddp", *short, DDPDIAG_TEST_FAULT="stall 1")
    assert job.wait(120) == 1, job.told()
    assert [row["status"] for row in rows(job).values()] == ["works", "hangs"], job.told()
    found = job.report["findings"][0]
    assert (found["code"], found["ranks"]) == ("TRN002.hangs", [1])
    job.check_left_nothing()
