"""Several processes under one agent of torchrun, which keeps the keys of all of them in one store."""

import sys

import pytest
from jobs import torchrun

CHECK = f"{sys.executable} -m ddpdiag check --select RDZ001 --json"
TRAIN = (
    f'{sys.executable} -c \'import torch.distributed as dist; dist.init_process_group("gloo"); dist.barrier(); '
    "dist.destroy_process_group()'"
)


def run(start, tmp_path, command: str):
    """Two ranks that run a command of several processes, one after the other."""
    script = tmp_path / "run.sh"
    script.write_text(f"set -e\n{command}\n")
    job = start(*torchrun(2, "--no-python"), "bash", str(script))
    return job, job.wait(150)


@pytest.mark.deep
def test_a_check_leaves_nothing_that_a_check_or_a_training_reads(start, tmp_path):
    job, code = run(
        start, tmp_path, f"{CHECK} {tmp_path}/1.json\n{CHECK} {{json}}\n{TRAIN}".format(json=tmp_path / "2")
    )
    assert code == 0, job.told()
    assert "RDZ001.stale" not in (tmp_path / "2").read_text()


@pytest.mark.deep
def test_the_keys_of_a_training_before_the_check_are_named(start, tmp_path):
    job, code = run(start, tmp_path, f"{TRAIN}\n{CHECK} {tmp_path}/1.json")
    assert code == 0, job.told()
    assert "RDZ001.stale" in (tmp_path / "1.json").read_text()
    assert "default_pg/" in (tmp_path / "1.json").read_text()
