"""HST003: /dev/shm."""

from seen import seen_of

from ddpdiag.checks.host.shared_memory import CHECK, Data
from ddpdiag.checks.hosts import GIB, MIB
from ddpdiag.model import Severity
from ddpdiag.probes.host.limits import SharedMemory


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
    assert finding.code == "HST003.missing"


def test_one_rank_of_a_host_speaks_for_all_of_its_ranks():
    run = seen_of(CHECK, {0: room(64 * MIB)}, size=4, ranks_per_node=2)
    assert run.trials[0].groups == ((0,), (2,))
    (finding,) = CHECK.judge(run)
    assert finding.ranks == (0, 1)
