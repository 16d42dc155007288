"""torchrun --rdzv-backend ddpdiag on three hosts: a host at fault leaves, and the others train what they would have."""

import signal
from pathlib import Path

import pytest
from jobs import processes
from launch import Launched

pytestmark = [pytest.mark.hosts, pytest.mark.deep]

TRAINING = str(Path(__file__).parent / "admitted_training.py")
WRONG_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo"}
NO_GPU = {"DDPDIAG_EXPECT_GPUS": "1"}
TRAINED = "of 2 has learned"


@pytest.fixture
def start(hosts, tmp_path):
    """torchrun on three hosts, with one rank each; `on_host` sets variables of single hosts."""
    runs = []

    def begin(*script: str, nnodes: str = "2:3", on_host: dict[int, dict[str, str]] | None = None):
        network, run = hosts(3), Launched(tmp_path / "run")
        runs.append(run)
        options = ["--nnodes", nnodes, "--max-restarts", "1", "--rdzv-backend", "ddpdiag"]
        options += ["--rdzv-endpoint", "h0:29400", "--rdzv-conf", "budget=60,last_call_timeout=5"]
        for host in network:
            # The other stages are not the subject, and these hosts share two cores.
            variables = {"DDPDIAG_STAGE": "rendezvous,collective", **(on_host or {}).get(host.index, {})}
            run.start(host.name, host, ["-m", "torch.distributed.run", *options, TRAINING, *script], variables)
        return network, run

    yield begin
    for run in runs:
        run.destroy()


def codes(run: Launched) -> list[int]:
    assert run.is_over(240), run.told()
    for job in run.jobs.values():
        assert job.left_processes() == []
        assert [file for file in job.left_files() if "ddpdiag" in str(file)] == []
    return [job.process.returncode for job in run.jobs.values()]


@pytest.mark.parametrize(
    ("sick", "fault", "sentence"),
    [
        (2, WRONG_INTERFACE, "gloo on h2 offers a loopback address"),
        (0, WRONG_INTERFACE, "gloo on h0 offers a loopback address"),
        (2, NO_GPU, "host h2 cannot train: no usable GPU"),
    ],
    ids=["world", "host-of-the-store", "host"],
)
def test_a_sick_host_leaves_and_the_others_train(start, sick, fault, sentence):
    _, run = start(on_host={sick: fault})
    assert codes(run) == [int(host == sick) for host in range(3)], run.told()
    assert sentence in run.jobs[f"h{sick}"].stderr
    trained = [name for name, job in run.jobs.items() if TRAINED in job.stdout]
    assert trained == [f"h{host}" for host in range(3) if host != sick], run.told()


def test_too_few_healthy_hosts_end_with_the_reason(start):
    _, run = start(nnodes="3", on_host={2: WRONG_INTERFACE})
    assert codes(run) == [1, 1, 1], run.told()
    for job in run.jobs.values():
        assert "Without h2, only 2 of at least 3 hosts (--nnodes) are left." in job.stderr


def test_a_host_that_turns_sick_leaves_at_the_restart(start, tmp_path):
    reached = tmp_path / "reached"
    network, run = start(str(reached), on_host={2: {"DDPDIAG_STRICT": "1"}})
    run.jobs["h0"].wait_until(reached.exists, 120)
    network[2].mount_tmpfs("/dev/shm", 1 << 20)
    assert codes(run) == [0, 0, 1], run.told()
    assert [TRAINED in job.stdout for job in run.jobs.values()] == [True, True, False]
    assert "RendezvousError: h2: " in run.jobs["h2"].stderr


def test_the_death_of_the_host_of_the_store_is_named(start):
    _, run = start()
    dying = run.jobs["h0"]
    dying.wait_until(lambda: "3 hosts met" in dying.stderr, 120)
    for process in processes(run.mark):
        if process.environ["TMPDIR"] == str(dying.temporary):
            process.kill(signal.SIGKILL)
    assert codes(run)[1:] == [1, 1], run.told()
    for name in ("h1", "h2"):
        assert "does not reach the store of the rendezvous at h0:29400" in run.jobs[name].stderr
