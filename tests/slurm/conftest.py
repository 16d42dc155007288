"""A Slurm cluster for tests: one of each size for the whole session, as new at the start of each test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from slurm_cluster import Cluster, folder, reason_against


def _require_slurm() -> None:
    """Skip with the reason where no cluster can be started; with DDPDIAG_REQUIRE_SLURM=1 that is a failure."""
    if reason := reason_against():
        if os.environ.get("DDPDIAG_REQUIRE_SLURM") == "1":
            pytest.fail(f"DDPDIAG_REQUIRE_SLURM=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def _clusters() -> Iterator[Callable[[int], Cluster]]:
    _require_slurm()
    with ExitStack() as stack:
        made: dict[int, Cluster] = {}

        def make(count: int) -> Cluster:
            if count not in made:
                made[count] = stack.enter_context(Cluster(count, stack.enter_context(folder())))
            return made[count]

        yield make


@pytest.fixture
def cluster(_clusters: Callable[[int], Cluster]) -> Iterator[Callable[[int], Cluster]]:
    """cluster(4): a cluster of four nodes; what a test did to it is undone after it."""
    used: list[Cluster] = []

    def take(count: int) -> Cluster:
        used.append(_clusters(count))
        return used[-1]

    yield take
    for one in used:
        one.restore()
