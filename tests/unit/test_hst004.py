"""HST004: limits inside the launched rank."""

from seen import seen_of

from ddpdiag.checks.hosts import GIB
from ddpdiag.checks.hst004 import CHECK, Data
from ddpdiag.probes.cgroup import Share
from ddpdiag.probes.limits import Limit, Limits


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def rank(nofile: int | None = 65536, memlock: int | None = None, nproc: int | None = None, **more):
    free = Limit(None, None)
    return Data(
        limits=Limits(nofile=Limit(nofile, None), memlock=Limit(memlock, None), nproc=Limit(nproc, None), stack=free),
        **more,
    )


def test_generous_limits_are_silent():
    assert found(rank(), rank(nofile=None)) == []


def test_the_usual_1024_files_are_enough_for_a_small_world():
    assert found(rank(nofile=1024), rank(nofile=1024)) == []


def test_the_usual_1024_files_are_few_for_a_large_world():
    (finding,) = found(rank(nofile=1024), size=64, ranks_per_node=64)
    assert finding.code == "HST004.open-files"
    assert "1024 open files allowed (soft limit), 4608 expected" in finding.message
    assert "ulimit -n 4608" in finding.remedy


def test_locked_memory_matters_only_with_rdma():
    assert found(rank(memlock=8 << 20)) == []
    (finding,) = found(rank(memlock=8 << 20, rdma=("mlx5_0",)))
    assert finding.code == "HST004.locked-memory"
    assert "8192 KiB" in finding.message
    assert found(rank(memlock=64 * GIB, rdma=("mlx5_0",))) == []


def test_a_group_that_is_nearly_full_is_a_warning():
    (finding,) = found(rank(tasks=Share(100, 90)))
    assert finding.code == "HST004.processes"
    assert "10 more tasks allowed (limit 100 of the control group), 128 expected" in finding.message


def test_a_user_who_is_nearly_at_the_limit_is_a_warning():
    (finding,) = found(rank(nproc=1000, user_processes=999))
    assert "ulimit -u" in finding.message


def test_one_finding_per_host_and_not_per_rank():
    assert len(found(*[rank(nofile=64)] * 4, ranks_per_node=4)) == 1


def test_limits_that_cannot_be_read_are_unknown():
    (finding,) = found(Data(limits=None))
    assert finding.code == "HST004.unreadable"
    assert "UNKNOWN" in finding.message


def test_processes_that_cannot_be_counted_matter_only_under_a_limit():
    (finding,) = found(rank(nproc=1000))
    assert finding.code == "HST004.unreadable"
    assert "how many processes the user has" in finding.message
    assert found(rank(nproc=None)) == []


def test_unknown_rdma_devices_matter_between_hosts_with_little_locked_memory():
    hidden = rank(memlock=8 << 20, rdma=None)
    assert [f.code for f in found(hidden, hidden, ranks_per_node=1)] == ["HST004.unreadable"] * 2
    assert found(hidden, hidden, ranks_per_node=2) == []
    assert found(*[rank(rdma=None)] * 2, ranks_per_node=1) == []
