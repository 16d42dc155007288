"""What real runs of torch 2.15 over both classes of process groups for NCCL left behind: who is blamed, and why.

The recordings are of two ranks on the CUDA stand-in: rank 1's first or twentieth all-reduce slept or was of another
size, NCCL hung while it made its communicator, or the ranks chose different classes.
"""

from pathlib import Path

import pytest

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.model import Finding, Recording


def recorded(name: str) -> Recording:
    return read_recording([Path(__file__).parents[1] / "recordings" / "process_groups" / f"{name}.jsonl"])


def failure(name: str) -> Finding:
    """RUN003's only finding."""
    (finding,) = [one for one in judge(recorded(name), all_checks()).findings if one.code.startswith("RUN003")]
    return finding


@pytest.mark.parametrize("name", ["nccl2-sleep", "nccl-sleep"])
def test_the_rank_that_slept_between_collectives_is_named(golden, name: str) -> None:
    finding = failure(name)
    assert (finding.code, finding.ranks) == ("RUN003.hung", (1,))
    golden(finding.message)


@pytest.mark.parametrize("name", ["nccl2-sizes", "nccl-sizes"])
def test_sizes_that_differ_are_shown_with_their_ranks(golden, name: str) -> None:
    finding = failure(name)
    assert (finding.code, finding.ranks) == ("RUN003.mismatch", ())
    golden(finding.message)


@pytest.mark.parametrize("name", ["nccl2-first", "nccl-first"])
def test_the_rank_that_never_called_the_first_collective_is_named(name: str) -> None:
    finding = failure(name)
    assert (finding.code, finding.ranks) == ("RUN003.hung", (1,))


@pytest.mark.parametrize("name", ["nccl2-init", "nccl-init"])
def test_a_communicator_that_is_never_made_is_a_step_of_its_own(golden, name: str) -> None:
    finding = failure(name)
    assert (finding.ranks, finding.evidence["last_step"]) == ((), "communicator")
    golden(finding.message)


def test_ranks_with_different_classes_hang_in_the_communicator_and_the_variable_explains_it(golden) -> None:
    finding = failure("mixed-classes")
    assert (finding.ranks, finding.hosts) == ((), ())
    golden(finding)
