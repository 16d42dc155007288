"""HST004: limits inside the launched rank."""

import pytest
from seen import seen_of

from ddpdiag.checks.host.limits import CHECK, Data
from ddpdiag.checks.hosts import GIB
from ddpdiag.model import Severity
from ddpdiag.probes.host.limits import Limit, Limits, Share


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def rank(nofile: int | None = 65536, memlock: int | None = None, nproc: int | None = None, **more):
    files, locked, processes = (Limit(soft, None) for soft in (nofile, memlock, nproc))
    return Data(limits=Limits(nofile=files, memlock=locked, nproc=processes), **more)


def test_generous_limits_are_silent():
    assert found(rank(), rank(nofile=None)) == []


def test_the_usual_1024_files_are_enough_for_a_small_world():
    assert found(rank(nofile=1024), rank(nofile=1024)) == []


LITTLE_LOCKED = 8 << 20


@pytest.mark.parametrize(
    ("own", "code", "size"),
    [
        (rank(nofile=1024), "HST004.open-files", 64),
        (rank(memlock=LITTLE_LOCKED, rdma=("mlx5_0",)), "HST004.locked-memory", 1),
        (rank(tasks=Share(512, 500)), "HST004.processes", 1),
        (rank(nproc=1000, user_processes=999), "HST004.processes", 1),
        (Data(limits=None), "HST004.unreadable", 1),
        (rank(nproc=1000), "HST004.unreadable", 1),
    ],
    ids=[
        "open-files",
        "locked-memory-with-rdma",
        "group-nearly-full",
        "user-nearly-at-the-limit",
        "limits-not-read",
        "processes-not-counted",
    ],
)
def test_a_limit_that_is_low_or_not_known_is_a_warning(golden, own, code, size):
    (finding,) = found(own, size=size, ranks_per_node=min(size, 8))
    assert (finding.code, finding.severity, finding.hosts) == (code, Severity.WARNING, ("n0",))
    golden(finding)


def test_locked_memory_matters_only_with_rdma():
    assert found(rank(memlock=LITTLE_LOCKED)) == []
    assert found(rank(memlock=64 * GIB, rdma=("mlx5_0",))) == []


def test_one_finding_per_host_and_not_per_rank():
    assert len(found(*[rank(nofile=64)] * 4, ranks_per_node=4)) == 1


def test_unknown_rdma_devices_matter_between_hosts_with_little_locked_memory():
    hidden = rank(memlock=LITTLE_LOCKED, rdma=None)
    assert [f.code for f in found(hidden, hidden, ranks_per_node=1)] == ["HST004.unreadable"] * 2
    assert found(hidden, hidden, ranks_per_node=2) == []
    assert found(*[rank(rdma=None)] * 2, ranks_per_node=1) == []
