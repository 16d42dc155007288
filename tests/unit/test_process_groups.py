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


# In `first`, the rank never called the first collective; in `init`, the communicator is never made.
FAILURES = [
    *((f"{group}-{name}", code, ranks, step)
      for group in ("nccl2", "nccl")
      for name, code, ranks, step in (
          ("sleep", "hung", (1,), None),
          ("sizes", "mismatch", (), None),
          ("first", "hung", (1,), None),
          ("init", "hung", (), "communicator"),
      )),
    ("mixed-classes", "hung", (), "communicator"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "ranks", "step"), FAILURES)
def test_the_rank_that_failed_is_named(golden, name: str, code: str, ranks: tuple[int, ...], step: str | None) -> None:
    finding = failure(name)
    assert (finding.code, finding.ranks) == (f"RUN003.{code}", ranks)
    assert step is None or finding.evidence["last_step"] == step
    golden(finding)
