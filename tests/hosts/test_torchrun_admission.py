"""torchrun --rdzv-backend ddpdiag on three hosts: a host at fault leaves, and the others train what they would have."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import Process, processes
from launch import Launched
from network import Host

pytestmark = [pytest.mark.hosts, pytest.mark.deep]

TRAINING = str(Path(__file__).parent / "admitted_training.py")
SECONDS = 400  # two checks of six ranks on two busy cores
NETWORK = "rendezvous,collective"
# A folder with one virtual environment for each release, as tests/processes/releases.py --keep makes it.
RELEASES = sorted(Path(os.environ.get("DDPDIAG_TORCHES", "/nonexistent")).glob("*/bin/python"))


class Fault(NamedTuple):
    """A host that becomes sick: `harm` is done to it, or it gets `variables`. `conf` and `stage` are for all hosts."""

    sentence: str
    harm: Callable[[Host], object] = lambda _host: None
    variables: Mapping[str, str] = {}
    conf: str = "on_warning=go"
    stage: str = NETWORK


def slow(host: Host) -> None:
    host.slow("20mbit")
    host.slow("20mbit", incoming=True)


def hide_torch(host: Host) -> None:
    """Show an empty folder in its place, as after a mount that failed."""
    empty = host.folder / "empty"
    empty.mkdir()
    host.bind(empty, next(Path(path) / "torch" for path in sys.path if (Path(path) / "torch" / "__init__.py").exists()))


LEAVE = "on_warning=leave"
HEALTHY = Fault("")
SLOW_CABLE = Fault("slow network between ", slow)
# The host with the highest address connects to all others over gloo, so that a closed port there does no harm.
FIREWALL = Fault("cannot train: ", lambda host: host.block(port="32768:60999", new=True))
SMALL_SHM = Fault("/dev/shm on ", lambda host: host.mount_tmpfs("/dev/shm", 1 << 20), conf=LEAVE, stage="host")
SLOW_CORES = Fault(
    "slower", variables={"DDPDIAG_TEST_FAULT": "slow-compute 4,slow-compute 5"}, conf=LEAVE, stage="training"
)
WRONG_INTERFACE = Fault("offers a loopback address", variables={"GLOO_SOCKET_IFNAME": "lo"})
NO_GPU = Fault("host h2 cannot train: no usable GPU", variables={"DDPDIAG_EXPECT_GPUS": "1"})


@pytest.fixture
def start(hosts, tmp_path):
    """torchrun with two ranks on each of so many hosts, of which the host `sick` has a fault."""
    runs = []

    def begin(*script: str, count=3, nnodes="2:3", sick: int | None = None, fault=HEALTHY, python=sys.executable):
        network, run = hosts(count), Launched(tmp_path / "run")
        runs.append(run)
        options = ["--nnodes", nnodes, "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "ddpdiag"]
        options += ["--rdzv-endpoint", "h0:29400", "--rdzv-conf", f"budget=100,last_call_timeout=15,{fault.conf}"]
        if sick is not None:
            fault.harm(network[sick])
        for host in network:
            # The other stages are not the subject, and these hosts share two cores.
            variables = {"DDPDIAG_STAGE": fault.stage, **(fault.variables if host.index == sick else {})}
            command = ["-m", "torch.distributed.run", *options, TRAINING, *script]
            run.start(host.name, host, command, variables, python=python)
        return network, run

    yield begin
    for run in runs:
        run.destroy()


def codes(run: Launched) -> list[int]:
    assert run.is_over(SECONDS), run.told()
    for job in run.jobs.values():
        assert job.left_processes() == []
        assert [file for file in job.left_files() if "ddpdiag" in str(file)] == []
    return [job.process.returncode for job in run.jobs.values()]


def trained(run: Launched) -> dict[str, int]:
    """By host, how many of its ranks have learned what one process learns from all data of two hosts."""
    return {name: job.stdout.count("of 4 has learned") for name, job in run.jobs.items()}


def check_two_trained(run: Launched, sick: int, sentence: str) -> None:
    assert codes(run) == [int(host == sick) for host in range(3)], run.told()
    assert trained(run) == {f"h{host}": 0 if host == sick else 2 for host in range(3)}, run.told()
    # torchrun shows the sentence as its last words, without a traceback.
    *_, last = run.jobs[f"h{sick}"].stderr.splitlines()
    assert last.startswith(f"ddpdiag: h{sick}"), run.told()
    assert sentence in last
    assert "Traceback" not in run.jobs[f"h{sick}"].stderr


@pytest.mark.parametrize(
    ("sick", "fault"),
    [
        pytest.param(2, SLOW_CABLE, id="cable"),
        pytest.param(1, FIREWALL, id="firewall"),
        pytest.param(2, SMALL_SHM, id="shm"),
        pytest.param(2, SLOW_CORES, id="cores"),
        pytest.param(2, WRONG_INTERFACE, id="interface"),
        pytest.param(2, NO_GPU, id="alone"),
        pytest.param(0, WRONG_INTERFACE, id="store-interface"),
        pytest.param(0, SLOW_CABLE, id="store-cable"),
    ],
)
def test_a_sick_host_leaves_and_the_others_train(start, sick, fault):
    _, run = start(sick=sick, fault=fault)
    check_two_trained(run, sick, fault.sentence)


def test_a_host_that_loses_torch_leaves_at_the_restart(start, tmp_path):
    reached = tmp_path / "reached"
    network, run = start(str(reached), fault=Fault("", stage="launch"))
    run.jobs["h0"].wait_until(reached.exists, SECONDS)
    hide_torch(network[2])
    check_two_trained(run, 2, "cannot train: rank 4 on h2: ")


LOSSY = Fault("", lambda host: host.lose(0.05))


@pytest.mark.parametrize(
    ("count", "sick", "fault", "code", "sentence"),
    [
        pytest.param(2, 1, LOSSY, 1, "No host is blamed, so none can leave.", id="pair-stops"),
        pytest.param(2, 1, LOSSY._replace(conf="on_unfit=warn"), 0, "", id="pair-goes"),
        pytest.param(3, 2, WRONG_INTERFACE, 1, "Without h2, only 2 of at least 3 hosts (--nnodes) are left.", id="few"),
        pytest.param(3, 2, SMALL_SHM, 0, "", id="few-warned"),
    ],
)
def test_where_no_host_can_leave_all_stop_or_go(start, count, sick, fault, code, sentence):
    _, run = start(count=count, nnodes=str(count), sick=sick, fault=fault)
    assert codes(run) == [code] * count, run.told()
    for job in run.jobs.values():
        assert sentence in job.stderr
        assert job.stdout.count("has learned") == (0 if code else 2)


def test_the_death_of_the_host_of_the_store_is_named(start):
    _, run = start()
    dying = run.jobs["h0"]
    dying.wait_until(lambda: [*dying.temporary.glob("ddpdiag-*")] and "3 hosts met" in dying.stderr, SECONDS)
    for process in processes(run.mark):
        if process.environ["TMPDIR"] == str(dying.temporary) and "torch.distributed.run" in process.command:
            process.kill(signal.SIGKILL)
    assert codes(run)[1:] == [1, 1], run.told()
    for name in ("h1", "h2"):
        assert "does not reach the store of the rendezvous at h0:29400" in run.jobs[name].stderr


@pytest.mark.parametrize(
    ("signum", "nnodes", "code"), [(signal.SIGTERM, "2:3", 0), (signal.SIGTERM, "3:3", 1), (signal.SIGINT, "2:3", 1)]
)
def test_the_others_do_not_wait_for_a_torchrun_that_a_signal_ends_during_the_check(start, signum, nnodes, code):
    _, run = start(count=3, nnodes=nnodes, fault=Fault("", stage="launch"))
    ended, *others = (run.jobs[name] for name in ("h2", "h0", "h1"))

    def own(word: str) -> list[Process]:
        found = processes(run.mark)
        return [each for each in found if word in each.command and each.environ["TMPDIR"] == str(ended.temporary)]

    ended.wait_until(lambda: own(" check --quiet"), SECONDS)
    for process in own("torch.distributed.run"):
        process.kill(signum)
    assert codes(run)[:2] == [code] * 2, run.told()
    for job in others:
        assert job.stdout.count("of 4 has learned") == (0 if code else 2)
        assert (f"{signum.name} ended torchrun on h2" in job.stderr) == bool(code), run.told()
        assert "Traceback" not in job.stderr


@pytest.mark.long
@pytest.mark.skipif(not RELEASES, reason="needs DDPDIAG_TORCHES, a folder with an environment for each release")
@pytest.mark.parametrize("python", RELEASES or [Path("/none/bin/python")], ids=lambda path: path.parts[-3])
@pytest.mark.parametrize("sick", [0, 2])
def test_a_sick_host_leaves_with_each_release_of_torch(start, python, sick):
    _, run = start(sick=sick, fault=WRONG_INTERFACE, python=str(python))
    check_two_trained(run, sick, WRONG_INTERFACE.sentence)
