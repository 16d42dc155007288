"""A place to start runs from, which ends whatever a failed test leaves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import Job

Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(arguments for Python, stdout=..., VARIABLE="value"): a running job."""
    jobs: list[Job] = []

    def started(*arguments: str, stdout: int | None = None, **variables: str) -> Job:
        jobs.append(Job(tmp_path / f"job-{len(jobs)}", arguments, variables, stdout))
        return jobs[-1]

    yield started
    for job in jobs:
        job.destroy()
