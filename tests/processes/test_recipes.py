"""The recipes, run."""

import os
import re

import pytest
from jobs import REPORT_HEAD, Job, Start

from recipes import BASH, RECIPES, SCRIPTS

TRAIN = str(RECIPES / "train_ddp.py")


def gated(start: Start, *training: str, **variables: str) -> Job:
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    return start("-c", BASH, str(RECIPES / "torchrun.sh"), *training, PATH=path, **variables)


@pytest.mark.deep
def test_torchrun_checks_everything_and_then_the_digits_are_learned_on_a_fit_host(start: Start) -> None:
    job = gated(start, TRAIN, "--save", "weights.pt")
    assert job.wait(300) == 0, job.told()
    assert len(REPORT_HEAD.findall(job.stdout)) == 1
    (share,) = re.findall(r"^epoch 1: loss [\d.]+, ([\d.]+)% ", job.stdout, re.MULTILINE)
    assert float(share) > 90
    assert (job.folder / "weights.pt").stat().st_size > 100_000


@pytest.mark.deep
def test_torchrun_does_not_train_on_an_unfit_host(start: Start) -> None:
    job = gated(start, TRAIN, DDPDIAG_TEST_FAULT="broken-import 1")
    assert job.wait(90) != 0
    assert len(REPORT_HEAD.findall(job.stdout)) == 1, job.told()
    assert "\nUNFIT: " in job.stdout
    assert "epoch" not in job.stdout
