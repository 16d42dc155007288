"""Tests on real GPUs: a place to start runs from, and recordings for later.

    pytest -m gpu tests/gpu

Where DDPDIAG_TEST_RECORDINGS names a folder, each run's recording is kept there, without names (see anonymise.py).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from anonymise import anonymise
from jobs import Job, Start, free_port

# Two ranks are strangers to NCCL then, so it does not mind that they share a GPU, and goes through a socket (NCCL
# init.cc compares GPUs of one host only; misc/utils.cc, getHostHash).
ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_CTAS": "4"}


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs torch can use; without one the test is skipped."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} can use no GPU here")
    return torch.cuda.device_count()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments for Python, VARIABLE="value"): a running job, ended after the test whatever happens."""
    jobs: list[Job] = []

    def start(*arguments: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path / f"job-{len(jobs)}", arguments, variables))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.destroy()


@pytest.fixture
def keep(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Options that record the run; the recording is kept where the tests were asked to."""
    record = tmp_path / "recording.jsonl"
    yield ("--record", str(record))
    folder = os.environ.get("DDPDIAG_TEST_RECORDINGS")
    if folder and record.exists():
        name = request.node.name.removeprefix("test_").replace("_", "-")
        Path(folder).mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{line}\n" for line in anonymise(record.read_text().splitlines()))
        (Path(folder) / f"gpu-{name}.jsonl").write_text(lines)


@pytest.fixture
def pair(start: Start, keep: tuple[str, ...]) -> Callable[..., Job]:
    """pair(command, option, ..., VARIABLE="value"): rank 0 of two real NCCL ranks on one GPU, over."""

    def run(command: str, *options: str, **variables: str) -> Job:
        port = str(free_port())
        place = ("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--backend", "nccl")
        jobs = []
        for rank in (1, 0):
            own = (*keep, "--json", "{json}") if rank == 0 else ()
            named = ON_ONE_GPU | {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"ddpdiag-{rank}"} | variables
            jobs.append(start("-m", "ddpdiag", command, *place, "--rank", str(rank), *options, *own, **named))
        for job in reversed(jobs):
            job.wait(300)
        return jobs[1]

    return run
