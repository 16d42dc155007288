"""Recipes for several hosts, run on two: torchrun, by hand, mpirun, and what stands in the YAML for Kubernetes."""

import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from jobs import REPORT_HEAD
from launch import Launched
from network import Network

from recipes import BASH, RECIPES, SCRIPTS

pytestmark = pytest.mark.hosts

PATH = f"{SCRIPTS}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
# Checks of a few seconds, which meet, or communicate as well; the recipes take the whole one.
MEET = "--select LCH001,RDZ002"
QUICK = "--select LCH001,RDZ002,COL001"
TRAIN = """\
import os
import socket

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} trained on {socket.gethostname()}\\n".encode())
dist.destroy_process_group()
"""
# Two hosts with one rank each, as `trained` finds them in the jobs' outputs.
ALL = {(0, "h0"), (1, "h1")}


@pytest.fixture
def network(hosts) -> Network:
    return hosts(2)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Launched]:
    """A run to which a test adds the command lines of its hosts."""
    run = Launched(tmp_path / "run")
    yield run
    run.destroy()


def shell(run: Launched, network: Network, index: int, *words: str, **variables: str) -> None:
    """What somebody types in a shell on that host."""
    run.start(f"h{index}", network[index], ("-c", BASH, *words), {"PATH": PATH, "RANKS": "1", **variables})


def finished(run: Launched, seconds: float = 120.0) -> str:
    """All output, once every shell has left with 0."""
    assert run.is_over(seconds), run.told()
    assert [job.process.returncode for job in run.jobs.values()] == [0] * len(run.jobs), run.told()
    return "".join(job.stdout for job in run.jobs.values())


def trained(output: str) -> set[tuple[int, str]]:
    """Who trained, and where."""
    lines = [line.split() for line in output.splitlines() if " trained on " in line]
    return {(int(words[1]), words[-1]) for words in lines}


# torchrun on two hosts is what the PyTorchJob starts as well.
@pytest.mark.deep
def test_torchrun_on_several_hosts(network, script, running):
    for index in range(2):
        variables = {"NNODES": "2", "NODE_RANK": str(index), "MASTER_ADDR": "h0", "CHECK": QUICK}
        shell(running, network, index, str(RECIPES / "torchrun-hosts.sh"), str(script), **variables)
    output = finished(running)
    assert len(REPORT_HEAD.findall(output)) == 1
    assert trained(output) == ALL


# On one host: test_recipes.py.
@pytest.mark.deep
def test_no_host_trains_where_the_check_fails(network, script, running):
    for index in range(2):
        variables = {"NNODES": "2", "NODE_RANK": str(index), "MASTER_ADDR": "h0"}
        variables["CHECK"] = "--select LCH001,GPU001 --expect-gpus 8"
        shell(running, network, index, str(RECIPES / "torchrun-hosts.sh"), str(script), **variables)
    assert running.is_over(120), running.told()
    assert all(job.process.returncode != 0 for job in running.jobs.values()), running.told()
    assert trained(running.told()) == set()


# By hand on several hosts: test_bench_hosts.py; the check, on one: test_runs.py.
@pytest.mark.deep
def test_by_hand_in_a_shell_on_each_host(network, script, running):
    for index in range(2):
        shell(running, network, index, str(RECIPES / "by-hand.sh"), str(index), "2", "h0", str(script), CHECK=MEET)
    assert trained(finished(running)) == ALL


@contextmanager
def doors(network: Network, folder: Path) -> Iterator[Path]:
    """A script that stands in for ssh: `agent h1 COMMAND` runs the command on that host of the network.

    From inside a host no other one can be entered, so a thread out here does it.
    """
    folder.mkdir()
    agent = folder / "agent"
    agent.write_text(
        f"""#!/bin/bash
host=$1; shift
own={folder}/$host-$$
printf '%s' "$*" >$own.new && mv $own.new $own.asked
until [ -e $own.left ]; do sleep 0.05; done
exit $(<$own.left)
"""
    )
    agent.chmod(0o755)
    over = threading.Event()

    def enter(asked: Path) -> None:
        host = next(host for host in network if asked.name.startswith(f"{host.name}-"))
        done = subprocess.run([*host.enter(folder), "bash", "-c", asked.read_text()], stdin=subprocess.DEVNULL)
        asked.with_suffix(".left").write_text(str(done.returncode))

    def attend() -> None:
        known: set[Path] = set()
        while not over.wait(0.05):
            for asked in set(folder.glob("*.asked")) - known:
                known.add(asked)
                threading.Thread(target=enter, args=(asked,), daemon=True).start()

    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    try:
        yield agent
    finally:
        over.set()
        thread.join()


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_checks_and_trains_on_several_hosts(network, script, running, tmp_path):
    (tmp_path / "hostfile").write_text("h0 slots=1\nh1 slots=1\n")
    with doors(network, tmp_path / "doors") as agent:
        options = ["--allow-run-as-root", "-np", "2", "--hostfile", str(tmp_path / "hostfile")]
        options += ["--mca", "plm_rsh_agent", str(agent)]
        shell(running, network, 0, str(RECIPES / "mpirun.sh"), *options, "--", str(script), CHECK=QUICK)
        output = finished(running)
    assert "2 ranks on 2 hosts (h[0-1]), openmpi" in output, running.told()
    assert trained(output) == ALL


def container(name: str, kind: str, which: str = "containers") -> dict:
    """The first container of the pods of a recipe's Job or PyTorchJob."""
    (document,) = [d for d in yaml.safe_load_all((RECIPES / name).read_text()) if d["kind"] == kind]
    spec = document["spec"]
    template = spec["template"] if kind == "Job" else spec["pytorchReplicaSpecs"]["Worker"]["template"]
    return template["spec"][which][0]


def environment(own: dict, changes: Mapping[str, str]) -> dict[str, str]:
    """The container's variables, some of them changed as the header says; each must be there."""
    told = {variable["name"]: variable["value"] for variable in own["env"]}
    assert changes.keys() <= told.keys()
    return told | dict(changes)


def quick(command: str, check: str) -> str:
    """The same command, with a shorter check."""
    assert "--join-timeout" in command
    return command.replace("--join-timeout", f"{check} --join-timeout")


def test_the_preflight_job_meets_by_what_kubernetes_gives_its_pods(network, running):
    for host in network:
        host.resolve("ddpdiag-preflight-0.ddpdiag-preflight", network[0].address)
    own = container("k8s-preflight-job.yaml", "Job")
    for index in range(2):
        # An indexed Job sets this one.
        told = environment(own, {"NPROC_PER_NODE": "1"}) | {"JOB_COMPLETION_INDEX": str(index)}
        shell(running, network, index, "-c", quick(own["command"][-1], MEET), **told)
    assert "2 ranks on 2 hosts" in finished(running)


def test_its_init_container_looks_at_the_node_alone(network, running):
    own = container("k8s-preflight-job.yaml", "Job", "initContainers")
    shell(running, network, 0, *own["command"][1:], **environment(own, {"NPROC_PER_NODE": "0"}))
    assert "host h0 alone" in finished(running)


@pytest.mark.deep
def test_the_pytorchjob_checks_and_trains_by_what_the_operator_gives_its_pods(network, script, running):
    own = container("pytorchjob.yaml", "PyTorchJob")
    command = quick(own["command"][-1], QUICK).replace("train.py", str(script))
    for host in network:
        host.resolve("train-master-0", network[0].address)
    for index in range(2):
        # pkg/controller.v1/pytorch/envvar.go and master.go, release 1.9: WORLD_SIZE counts processes, RANK pods.
        told = {"MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "PYTHONUNBUFFERED": "1"}
        told |= {"MASTER_ADDR": "train-master-0", "PET_MASTER_ADDR": "train-master-0"}
        told |= {"WORLD_SIZE": "2", "RANK": str(index), "PET_NODE_RANK": str(index)}
        told |= {"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2"}
        shell(running, network, index, "-c", command, **told)
    output = finished(running)
    assert len(REPORT_HEAD.findall(output)) == 1
    assert trained(output) == ALL
