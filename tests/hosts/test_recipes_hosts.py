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


# torchrun on two hosts is what the recipes for Kubernetes start as well.
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


def container(name: str, kind: str, which: str = "containers", job: int = 0) -> dict:
    """The first container of the pods of a recipe's Job, or of one of its replicated jobs."""
    (document,) = [d for d in yaml.safe_load_all((RECIPES / name).read_text()) if d["kind"] == kind]
    spec = document["spec"]
    spec = spec["template"]["spec"] if kind == "ClusterTrainingRuntime" else spec
    spec = spec["replicatedJobs"][job]["template"]["spec"] if "replicatedJobs" in spec else spec
    return spec["template"]["spec"][which][0]


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


def injected(index: int) -> dict[str, str]:
    """What Trainer 2.3 passes to the pods of a TrainJob `train` (pkg/runtime/framework/plugins/torch/torch.go)."""
    told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
    return told | {"PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}


@pytest.mark.deep
@pytest.mark.parametrize("recipe", ["kubeflow-runtime.yaml", "jobset.yaml"])
def test_pods_check_and_train_with_what_they_are_given(network, script, running, recipe):
    if recipe == "jobset.yaml":
        check, train = (container(recipe, "JobSet", job=job) for job in range(2))
        names, own = ("train-preflight-0-0.train", "train-train-0-0.train"), environment(check, {"NPROC_PER_NODE": "1"})
    else:
        check = container(recipe, "ClusterTrainingRuntime", "initContainers")
        train, names, own = container(recipe, "ClusterTrainingRuntime"), ("train-node-0-0.train",), {}
    start = train["command"][-1] if train["command"][0] == "bash" else f"exec {' '.join(train['command'])}"
    command = f"(\n{quick(check['command'][-1], QUICK)}\n) && {start.replace('train.py', str(script))}"
    for index, host in enumerate(network):
        for name in names:
            host.resolve(name, network[0].address)
        told = own | {"JOB_COMPLETION_INDEX": str(index)} if own else injected(index)
        shell(running, network, index, "-c", command, **told)
    output = finished(running)
    assert len(REPORT_HEAD.findall(output)) == 1
    assert trained(output) == ALL


# Options; variables of the second pod, None: it does not start; ddpdiag's exit code, the container's.
ENDS = {
    "warnings": (MEET.replace("LCH001", "LCH001,LCH002"), {"NCCL_ALGO": "Ring"}, 10, 0),
    "unfit": ("--select LCH001,GPU001 --expect-gpus 8", {}, 30, 30),
    "pod missing": (f"{MEET} --join-timeout 2", None, 20, 20),
    "wrong option": ("--selekt LCH001", None, 30, 30),
}


@pytest.mark.deep
@pytest.mark.parametrize("case", ENDS)
def test_exit_codes_of_an_init_container(network, running, case):
    options, second, own_code, code = ENDS[case]
    check = container("kubeflow-runtime.yaml", "ClusterTrainingRuntime", "initContainers")["command"][-1]
    command = check.replace("--join-timeout 240", options if "--join" in options else f"{options} --join-timeout 60")
    command = command.replace("code=$?", 'code=$?; echo "ddpdiag: $code"')
    for index, host in enumerate(network):
        host.resolve("train-node-0-0.train", network[0].address)
        if index == 0 or second is not None:
            shell(running, network, index, "-c", command, **injected(index), **((second or {}) if index else {}))
    assert running.is_over(120), running.told()
    assert {job.process.returncode for job in running.jobs.values()} == {code}, running.told()
    assert running.told().count(f"ddpdiag: {own_code}\n") == len(running.jobs), running.told()


@pytest.mark.deep
@pytest.mark.parametrize("peers", [2, 1])
def test_nvsentinels_gang_is_checked_once_all_pods_are_known(network, running, tmp_path, peers):
    """The files of a gang's ConfigMap and the variables of its webhook (NVSentinel 0aedaf36)."""
    gang = tmp_path / "gang"
    gang.mkdir()
    (gang / "expected_count").write_text("2")
    (gang / "master_addr").write_text(network[0].address)
    (gang / "peers").write_text("\n".join(f"pod-{i};{network[i].address};{i};preflight-ddpdiag" for i in range(peers)))
    (values,) = yaml.safe_load_all((RECIPES / "nvsentinel-values.yaml").read_text())
    command = quick(values["preflight"]["initContainers"][0]["command"][-1], MEET).replace("auto", "1")
    told = {"GANG_CONFIG_DIR": str(gang), "GANG_TIMEOUT_SECONDS": "2", "MASTER_PORT": "29500"}
    for index in range(2):
        shell(running, network, index, "-c", command, POD_NAME=f"pod-{index}", **told)
    if peers == 2:
        assert "2 ranks on 2 hosts" in finished(running)
        return
    assert running.is_over(60), running.told()
    assert [job.process.returncode for job in running.jobs.values()] == [3, 3]
    assert running.told().count("1 of 2 pods are known") == 2
