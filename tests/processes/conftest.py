"""A place to start runs from, which ends whatever a failed test leaves."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import Job, Start


@contextmanager
def _starting(folder: Path) -> Iterator[Start]:
    jobs: list[Job] = []
    numbers = itertools.count()  # several threads may start jobs

    def start(
        *arguments: str,
        stdout: int | None = None,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        **variables: str,
    ) -> Job:
        job = Job(folder / f"job-{next(numbers)}", arguments, variables, stdout, prefix=prefix, python=python)
        jobs.append(job)
        return job

    try:
        yield start
    finally:
        for job in jobs:
            job.destroy()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments for Python, stdout=..., prefix=(...), python=..., VARIABLE="value"): a running job."""
    with _starting(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The same, for jobs that several tests look at."""
    with _starting(tmp_path_factory.mktemp("jobs")) as start:
        yield start


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> frozenset[str]:
    """The values of the parameter `name` in tests of the module that will run; what no test looks at is not started."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return frozenset(call.params["name"] for call in calls if call is not None and "name" in call.params)
