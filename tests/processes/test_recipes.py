"""The recipes, run."""

import os
import re

import pytest
from jobs import REPORT_HEAD, Job, Start, torchrun

from recipes import BASH, RECIPES, SCRIPTS

TRAIN = str(RECIPES / "train_ddp.py")


def gated(start: Start, *training: str, **variables: str) -> Job:
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    return start("-c", BASH, str(RECIPES / "torchrun.sh"), *training, PATH=path, **variables)


def recognised(job: Job) -> float:
    """The share of the test images that both ranks together know after one epoch, in per cent."""
    (share,) = re.findall(r"^epoch 1: loss [\d.]+, ([\d.]+)% ", job.stdout, re.MULTILINE)
    return float(share)


def test_torchrun_checks_everything_and_then_trains_on_a_fit_host(start: Start) -> None:
    # In few large steps, which learn little.
    job = gated(start, TRAIN, "--global-batch", "1000", "--save", "weights.pt")
    assert job.wait(150) == 0, job.told()
    assert len(REPORT_HEAD.findall(job.stdout)) == 1
    assert recognised(job) > 0
    assert (job.folder / "weights.pt").stat().st_size > 100_000


def test_torchrun_does_not_train_on_an_unfit_host(start: Start) -> None:
    job = gated(start, TRAIN, DDPDIAG_TEST_FAULT="broken-import 1")
    assert job.wait(90) != 0
    assert len(REPORT_HEAD.findall(job.stdout)) == 1, job.told()
    assert "\nUNFIT: " in job.stdout
    assert "epoch" not in job.stdout


@pytest.mark.deep
def test_the_training_script_learns_the_digits(start: Start) -> None:
    job = start(*torchrun(2), TRAIN)
    assert job.wait(150) == 0, job.told()
    assert recognised(job) > 90
