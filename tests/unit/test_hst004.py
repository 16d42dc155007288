"""HST004: limits inside the launched rank."""

import pytest
from seen import seen_of

from ddpdiag.checks.host.limits import CHECK, Data
from ddpdiag.checks.hosts import GIB
from ddpdiag.model import Severity
from ddpdiag.probes.host.limits import LimitUse, ResourceLimits


def found(*rows, **world):
    return list(CHECK.judge(seen_of(CHECK, dict(enumerate(rows)), **world)))


def rank(nofile: int | None = 65536, memlock: int | None = None, nproc: int | None = None, **more):
    return Data(limits=ResourceLimits(nofile=nofile, memlock=memlock, nproc=nproc), **more)


LITTLE_LOCKED = 8 << 20
HIDDEN = rank(memlock=LITTLE_LOCKED, rdma=None)


@pytest.mark.parametrize(
    ("rows", "per_node", "words"),
    [
        pytest.param([rank(), rank(nofile=None)], 2, [], id="generous"),
        pytest.param([rank(nofile=1024)] * 2, 2, [], id="the usual 1024 files in a small world"),
        pytest.param([rank(memlock=LITTLE_LOCKED)], 1, [], id="little locked memory without RDMA"),
        pytest.param([rank(memlock=64 * GIB, rdma=("mlx5_0",))], 1, [], id="much locked memory with RDMA"),
        pytest.param([rank(nofile=64)] * 4, 4, ["open-files"], id="one finding per host"),
        pytest.param([HIDDEN] * 2, 1, ["unreadable"] * 2, id="unknown RDMA devices between hosts"),
        pytest.param([HIDDEN] * 2, 2, [], id="unknown RDMA devices of one host"),
        pytest.param([rank(rdma=None)] * 2, 1, [], id="unknown RDMA devices with unlimited memory"),
    ],
)
def test_limits_that_do_no_harm_are_silent(rows, per_node, words):
    assert [f.code.removeprefix("HST004.") for f in found(*rows, ranks_per_node=per_node)] == words


@pytest.mark.parametrize(
    ("own", "code", "size"),
    [
        (rank(nofile=1024), "HST004.open-files", 64),
        (rank(memlock=LITTLE_LOCKED, rdma=("mlx5_0",)), "HST004.locked-memory", 1),
        (rank(tasks=LimitUse(512, 500)), "HST004.processes", 1),
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
