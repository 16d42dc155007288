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


def test_enough_is_silent():
    assert found(room(1 * GIB), room(1 * GIB), gpus=2) == []


def test_a_containers_default_is_a_warning_without_gpus(golden):
    (finding,) = found(room(64 * MIB, size=64 * MIB), room(64 * MIB, size=64 * MIB))
    assert finding.severity is Severity.WARNING
    assert finding.ranks == (0, 1)
    golden(finding)


def test_a_containers_default_is_an_error_with_two_gpus():
    (finding,) = found(room(64 * MIB), room(64 * MIB), gpus=2)
    assert finding.severity is Severity.ERROR


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


def test_a_full_one_is_judged_by_what_is_free():
    (finding,) = found(room(1 * MIB, size=64 * GIB), gpus=1)
    assert finding.severity is Severity.ERROR


def test_many_ranks_need_more_than_the_usual(golden):
    (finding,) = found(*[room(600 * MIB)] * 16, ranks_per_node=16, gpus=16)
    assert finding.severity is Severity.ERROR
    golden(finding)


def test_a_file_without_pages_is_an_error_only_with_gpus(golden):
    full = room(0, size=64 * MIB, error="No space left on device")
    (with_gpu,), (without,) = found(full, gpus=1), found(full)
    assert (with_gpu.severity, without.severity) == (Severity.ERROR, Severity.WARNING)
    golden(with_gpu, without)


def test_a_missing_one_is_a_finding():
    (finding,) = found(Data(None), gpus=1)
    assert finding.code == "HST003.unusable"


def test_one_rank_of_a_host_speaks_for_all_of_its_ranks():
    run = seen_of(CHECK, {0: room(64 * MIB)}, size=4, ranks_per_node=2)
    assert run.trials[0].groups == ((0,), (2,))
    (finding,) = CHECK.judge(run)
    assert finding.ranks == (0, 1)
