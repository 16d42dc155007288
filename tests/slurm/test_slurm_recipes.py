"""The recipes for Slurm, run by Slurm: on good hosts, on bad ones, and while hosts are lost."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_cluster import Cluster

pytestmark = pytest.mark.slurm

RECIPES = Path(__file__).parents[2] / "recipes"
_SAY = """
import os
print("trained as rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename)
"""


@pytest.fixture
def four(cluster) -> Cluster:
    return cluster(4)


@pytest.fixture
def training(tmp_path) -> Path:
    """A script in place of a training: it says who it is."""
    script = tmp_path / "say.py"
    script.write_text(_SAY)
    return script


class Pause:
    """A rank pauses in its first all-reduce: time for a fault from outside."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._reached = folder / "reached"
        self.variables = {"DDPDIAG_TEST_FAULT": f"pause {rank}", "DDPDIAG_TEST_REACHED": str(self._reached)}

    def wait(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self._reached.exists():
            assert time.monotonic() < end
            time.sleep(0.05)


def trained(output: str) -> list[str]:
    """The hosts on which the script ran, by rank; all ranks of one world."""
    found = sorted(re.findall(r"trained as rank (\d+) of (\d+) on (\w+)", output))
    assert [rank for rank, _size, _host in found] == [str(rank) for rank in range(len(found))], output
    assert {size for _rank, size, _host in found} <= {str(len(found))}, output
    return [host for _rank, _size, host in found]


def lines(cluster: Cluster, job: int, name: str) -> list[str]:
    """A file that the check of a job left, of all its restarts."""
    found = sorted(cluster.shared.glob(f"check-{job}/{name}")) + sorted(cluster.shared.glob(f"check-{job}-*/{name}"))
    return [line for path in found for line in path.read_text().splitlines()]


# The gate ------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_two_jobs_at_once_on_the_same_hosts_do_not_disturb_each_others_verdict(four, training, tmp_path):
    faulty = Pause(1, tmp_path).variables | {"DDPDIAG_TEST_FAULT": "corrupt 1"}
    gate, check = RECIPES / "slurm-gate.sbatch", {"CHECK": "--select LCH001,RDZ002,COL001"}
    jobs = [
        four.sbatch(gate, f"-N{hosts}", f"--nodelist=h[0-{hosts - 1}]", arguments=[training], **check, **variables)
        for hosts, variables in ((3, faulty), (2, {}))
    ]
    bad, good = (four.wait(job) for job in jobs)
    assert (bad.state, bad.exit_code, trained(bad.output)) == ("FAILED", 1, []), bad.output
    assert lines(four, jobs[0], "bad") == ["h1"]
    assert (good.state, trained(good.output)) == ("COMPLETED", ["h0", "h1"]), good.output
    assert lines(four, jobs[1], "bad") == []


# The recipe is that of the test above, and train_ddp.py learns the digits in tests/processes/test_recipes.py.
@pytest.mark.deep
def test_a_healthy_allocation_passes_the_gate_and_trains(four):
    job = four.sbatch(RECIPES / "slurm-gate.sbatch", "-N4", arguments=[RECIPES / "train_ddp.py"])
    ended = four.wait(job)
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.output
    share = re.search(r"epoch 1: loss [\d.]+, ([\d.]+)% of the test images recognised", ended.output)
    assert share is not None, ended.output
    assert float(share[1]) > 90
    assert lines(four, job, "bad") == []


# Bad hosts -----------------------------------------------------------------------------------------------------------


# The way back into the queue, after a check that found h1 bad, is that of the next test.
@pytest.mark.deep
def test_bad_hosts_send_the_job_back_into_the_queue_without_them_until_the_limit(four, training):
    four.slow("h1")
    options = (RECIPES / "slurm-requeue.sbatch", "-N3")
    check = {"CHECK": "--stage launch,rendezvous"}
    jobs = [four.sbatch(*options, arguments=[training], LIMIT=limit, **check) for limit in ("1", "0")]
    ended, at_once = (four.wait(job) for job in jobs)
    assert (ended.state, trained(ended.output)) == ("COMPLETED", ["h0", "h2", "h3"]), ended.output
    now = four.state(jobs[0])
    assert (now["Restarts"], now["ExcNodeList"]) == ("1", "h1")
    assert (at_once.state, at_once.exit_code, trained(at_once.output)) == ("FAILED", 1, []), at_once.output
    assert [lines(four, job, "bad-hosts") for job in jobs] == [["h1"], ["h1"]]


def test_whom_the_user_left_out_stays_out_of_a_job_that_is_put_back(four, training, tmp_path):
    """Slurm is what is tested here: a script in place of the check finds h1 bad at once."""
    script = tmp_path / "ddpdiag"
    script.write_text('#!/bin/sh\nwhile [ "$1" != --write-failing-hosts ]; do shift; done\necho h1 >"$2"\nexit 1\n')
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}:/usr/sbin:/sbin"
    job = four.sbatch(RECIPES / "slurm-requeue.sbatch", "-N2", "--exclude=h3", arguments=[training], PATH=path)
    end = time.monotonic() + 60
    while four.state(job)["ExcNodeList"] != "h1,h3":
        assert time.monotonic() < end, four.told(job)
        time.sleep(0.1)


SPARES = RECIPES / "slurm-gate-with-spares.sbatch"
CHECK = "--depth standard --skip-stage training --skip-stage host"


@pytest.mark.deep
def test_with_spares_a_slow_host_and_one_that_is_cut_off_are_left_out(four, training, tmp_path):
    four.slow("h1")
    pause = Pause(3, tmp_path)
    job = four.sbatch(SPARES, "-N4", arguments=[training], NEED="2", CHECK=CHECK, **pause.variables)
    pause.wait()
    four.cut_off("h3")
    ended = four.wait(job)
    assert (ended.state, trained(ended.output)) == ("COMPLETED", ["h0", "h2"]), ended.output
    assert lines(four, job, "bad-hosts") == ["h1", "h3"]
    assert "FAB001.host" in ended.output
    # The others were given back, so that their end is not that of the training.
    assert four.state(job)["NodeList"] == "h[0,2]"


@pytest.mark.deep
def test_with_spares_the_loss_of_rank_0s_host_and_of_a_slurmd_is_survived(four, training, tmp_path):
    pause = Pause(1, tmp_path)
    words = ("salloc", "-N4", "--exclusive", "--no-kill", "bash", SPARES, training)
    variables = {"NEED": "2", "CHECK": "--stage launch,collective", **pause.variables}
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: four.run(*words, seconds=180.0, **variables))
        pause.wait()
        four.power_off("h0")
        four.kill_slurmd("h2")
        done = running.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert trained(done.stdout) == ["h1", "h3"], done.stdout + done.stderr
    assert re.search(r"^note: rank 0 was lost", done.stdout, re.MULTILINE), done.stdout
    job = int(re.search(r"job allocation (\d+)", done.stderr)[1])
    assert lines(four, job, "bad-hosts") == ["h0"]


@pytest.mark.deep
def test_with_spares_slurm_starts_the_job_again_when_the_host_of_its_script_is_lost(four, training, tmp_path):
    pause = Pause(1, tmp_path)
    check = {"CHECK": "--stage launch,collective", "NEED": "3"}
    job = four.sbatch(SPARES, "-N3-4", arguments=[training], **check, **pause.variables)
    pause.wait()
    four.crash("h0")
    four.miss("h0")
    ended = four.wait(job)
    assert (ended.state, trained(ended.output)) == ("COMPLETED", ["h1", "h2", "h3"]), ended.output
    assert four.state(job)["Restarts"] == "1"


# Replicas ------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_replicas_of_a_network_that_is_cut_train_in_both_forms_and_exit_codes_come_back(four):
    recipe = RECIPES / "slurm-model-replicas.sbatch"
    forms = {"step": "slurm", "loop": "torchrun"}
    jobs = {
        (form, devices): four.sbatch(
            recipe, "--ntasks-per-node=2", arguments=["--steps", "6"], FORM=form, REPLICAS="2", DEVICES=devices
        )
        for devices in ("99", "2")
        for form in forms
    }
    for form, launcher in forms.items():
        assert four.wait(jobs[form, "99"]).state == "FAILED"
        ended = four.wait(jobs[form, "2"])
        assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.output
        assert f"4 ranks on 2 hosts (h[0-1]), {launcher}, gloo" in ended.output
        assert re.search(r"^model-parallel +works +4 ", ended.output, re.MULTILINE), ended.output
