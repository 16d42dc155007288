"""Tests on real GPUs: a place to start runs from, and recordings for later.

    pytest -m gpu

The field run is first (test_field_run.py), and leaves an archive in the current directory (see field.py). All together
take 8 minutes at most, or $DDPDIAG_GPU_SECONDS: what there is no time for is skipped. Where DDPDIAG_TEST_RECORDINGS
names a folder, the recordings of the other tests are kept there, without names (see anonymise.py).
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from anonymise import anonymise
from field import NAME, ON_ONE_GPU, SECONDS, SECONDS_OF_EIGHT, FieldRun
from jobs import Job, Start, free_port
from shown import SHOWN

import ddpdiag


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs torch can use; without one the test is skipped."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} can use no GPU here")
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def field(gpus: int, pytestconfig: pytest.Config) -> Iterator[FieldRun]:
    """The field run; its archive is written when all is over, and what was unexpected is shown."""
    limit = os.environ.get("DDPDIAG_GPU_SECONDS")
    run = FieldRun(float(limit) if limit else SECONDS + (SECONDS_OF_EIGHT if gpus >= 8 else 0.0))
    yield run
    path = Path(f"{NAME}.tar.gz").absolute()
    run.write_archive(path, _versions())
    lines = [*run.lines, f"archive: {path} ({len(run.recordings)} recordings; ddpdiag judge reads each)"]
    pytestconfig.stash.setdefault(SHOWN, {})["field run"] = lines


def _versions() -> Mapping[str, object]:
    import torch

    return {
        "ddpdiag": ddpdiag.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version() if torch.version.cuda else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


@pytest.fixture(autouse=True)
def _in_time(request: pytest.FixtureRequest) -> None:
    """Skip a test that needs a GPU where the time of all of them is over."""
    if request.node.get_closest_marker("gpu") is not None and (run := request.getfixturevalue("field")).left < 60:
        pytest.skip(f"{run.left:.0f} s are left of {run.limit_seconds:.0f} s (DDPDIAG_GPU_SECONDS)")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments for Python, VARIABLE="value"): a running job, ended after the test whatever happens."""
    jobs: list[Job] = []

    # Jobs drop variables of ddpdiag; this one is the /proc of a machine whose GPUs are stand-ins.
    procfs = {name: os.environ[name] for name in ("DDPDIAG_PROCFS",) if name in os.environ}

    def start(*arguments: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path / f"job-{len(jobs)}", arguments, procfs | variables))
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
