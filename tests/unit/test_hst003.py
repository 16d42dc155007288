"""HST003: /dev/shm."""

import pytest
from seen import seen_of, together

from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.host.shared_memory import CHECK, Data
from ddpdiag.checks.hosts import GIB, MIB
from ddpdiag.model import Severity
from ddpdiag.probes.host.limits import SharedMemory
from ddpdiag.stats import samples


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def room(free, size=64 * GIB, error=None):
    return Data(SharedMemory(size, free, error))


SMALL, FULL = room(64 * MIB, size=64 * MIB), room(0, size=64 * MIB, error="No space left on device")
# /dev/shm of each rank of a host, its GPUs, and the finding.
HOSTS = {
    "enough": ([room(1 * GIB)] * 2, 2, None),
    "a container's default without GPUs": ([SMALL] * 2, 0, ("small", Severity.WARNING)),
    "a container's default with GPUs": ([SMALL] * 2, 2, ("small", Severity.ERROR)),
    "little of much": ([room(1 * MIB, size=64 * GIB)], 1, ("small", Severity.ERROR)),
    "many ranks": ([room(600 * MIB)] * 16, 16, ("small", Severity.ERROR)),
    "a file without pages": ([FULL], 0, ("unusable", Severity.WARNING)),
    "a file without pages with a GPU": ([FULL], 1, ("unusable", Severity.ERROR)),
    "a missing one": ([Data(None)], 1, ("unusable", Severity.ERROR)),
}


@pytest.mark.parametrize("host", HOSTS)
def test_shared_memory_that_is_small_or_unusable_is_one_finding_of_the_host(golden, host):
    rows, gpus, expected = HOSTS[host]
    findings = found(*rows, ranks_per_node=len(rows), gpus=gpus)
    words = [(finding.code.removeprefix("HST003."), finding.severity, finding.ranks) for finding in findings]
    assert words == ([] if expected is None else [(*expected, tuple(range(len(rows))))])
    if findings:
        golden(*findings)


def all_reduced(*ranks, backend="nccl", wrong=0):
    """What COL001 measured on these ranks."""
    row = all_reduce.Data(backend, 2, 4, samples([1e-4]), 4 << 20, samples([0.01]), wrong)
    return seen_of(all_reduce.CHECK, dict.fromkeys(ranks, row), gpus=2)


def judged_beside(col001, free):
    """The finding on two ranks with so much room, in a run in which COL001 measured as well."""
    (finding,) = CHECK.judge(
        together(seen_of(CHECK, dict.fromkeys(range(2), room(free, size=64 * MIB)), gpus=2), col001)
    )
    return finding


def test_a_containers_default_with_which_nccl_passed_is_a_warning(golden):
    finding = judged_beside(all_reduced(0, 1), 64 * MIB)
    assert finding.severity is Severity.WARNING
    golden(finding)


@pytest.mark.parametrize(
    "col001",
    [all_reduced(0), all_reduced(0, 1, backend="gloo"), all_reduced(0, 1, wrong=1)],
    ids=["not on all ranks", "over gloo", "wrong values"],
)
def test_an_all_reduce_that_proves_nothing_leaves_the_error(col001):
    assert judged_beside(col001, 64 * MIB).severity is Severity.ERROR


def test_one_rank_of_a_host_speaks_for_all_of_its_ranks():
    run = seen_of(CHECK, {0: room(64 * MIB)}, size=4, ranks_per_node=2)
    assert run.trials[0].groups == ((0,), (2,))
    (finding,) = CHECK.judge(run)
    assert finding.ranks == (0, 1)
