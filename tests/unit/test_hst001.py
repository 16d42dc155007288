"""HST001: cores against ranks and threads."""

import pytest
from seen import seen_of

from ddpdiag.checks.host.cores import CHECK, Data
from ddpdiag.model import Severity, Status


def rank(*affinity, cores=8, **more):
    return Data(cores=cores, affinity=affinity, **more)


NOTE, WARNING = Severity.NOTE, Severity.WARNING
# The ranks of a host; the finding, its severity, ranks and variables.
HOSTS = {
    "a core and a thread for each rank": ([rank(0, 1, omp_threads=2), rank(2, 3, omp_threads=2)], None),
    "twice as many threads as cores": ([rank(0, 1)] * 2, None),
    "ranks pinned to one core": ([rank(3)] * 2, ("one-core", WARNING, (0, 1), {})),
    "a single core": ([rank(0, cores=1, omp_threads=1)] * 2, ("oversubscribed", NOTE, (0, 1), {})),
    "too many threads": ([rank(*range(8))] * 4, ("oversubscribed", WARNING, (0, 1, 2, 3), {"OMP_NUM_THREADS": "2"})),
    "too many ranks of one thread": ([rank(0, 1, omp_threads=1)] * 8, ("oversubscribed", WARNING, tuple(range(8)), {})),
    "too many ranks and threads": (
        [rank(0, 1)] * 4,
        ("oversubscribed", WARNING, (0, 1, 2, 3), {"OMP_NUM_THREADS": "1"}),
    ),
    "a tight quota": ([rank(*range(8), quota=1.5)] * 2, ("oversubscribed", WARNING, (0, 1), {"OMP_NUM_THREADS": "1"})),
    "a quota of one core": (
        [rank(*range(8), quota=1.0)] * 2,
        ("oversubscribed", WARNING, (0, 1), {"OMP_NUM_THREADS": "1"}),
    ),
    "one core of an unknown number": ([rank(0, cores=None)] * 2, ("unreadable", WARNING, (0, 1), {})),
    "an unknown binding": ([rank(0, 1), rank()], ("unreadable", WARNING, (1,), {})),
    "an unknown number of cores": ([rank(core, cores=None, omp_threads=1) for core in (0, 1)], None),
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_with_too_few_cores_is_one_finding(golden, host):
    rows, expected = HOSTS[host]
    findings = list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), ranks_per_node=len(rows))))
    words = [(found.code.removeprefix("HST001."), found.severity, found.ranks, found.env) for found in findings]
    assert words == ([] if expected is None else [expected])
    if findings:
        golden(*findings)


def test_a_rank_that_did_not_answer_is_left_out():
    assert list(CHECK.judge(seen_of(CHECK, {1: rank(0)}, statuses={0: Status.HUNG}))) == []
