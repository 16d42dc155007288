"""Hangs of a training with several process groups, found in the recorders of its ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddpdiag.evidence.attribution import Job, find_faults
from ddpdiag.evidence.dumps import read_dumps

JOB = Path(__file__).with_name("hanging_job.py")
CODES = {
    "sleeps": "dump.behind",
    "raises": "dump.no-dump",
    "leaves": "dump.behind",
    "other collective": "dump.mismatch",
    "other order": "dump.deadlock",
}


@pytest.mark.deep
@pytest.mark.parametrize("rank", [2, 5])
@pytest.mark.parametrize("world_size", [8, 16])
@pytest.mark.parametrize("fault", CODES)
def test_the_rank_with_a_fault_is_named_and_no_other(tmp_path, fault, world_size, rank):
    subprocess.run([sys.executable, JOB, tmp_path, str(world_size), fault, str(rank)], check=True, timeout=120)
    witnesses, problems = read_dumps([str(path) for path in tmp_path.glob("trace_*")])
    assert not problems
    assert [(found.code, found.ranks) for found in find_faults(Job(witnesses))] == [(CODES[fault], (rank,))]
