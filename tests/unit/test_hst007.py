"""HST007: RDMA ports of hosts that are compared. Every host here is a made-up /sys."""

import pytest
from msgspec import structs
from rails import DOWN, LINK_LOCAL, ROCE, Rail, host, rails, roce, with_rail
from seen import seen_of, skip_text, together

from ddpdiag.checks.api import Nothing
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.host import limits
from ddpdiag.checks.host.rdma_ports import CHECK, read_rdma_data
from ddpdiag.model import RunOptions, Severity

GOOD = rails()
WARNED, FAILED = (Severity.WARNING, ("n1",)), (Severity.ERROR, ("n1",))


def seen(hosts, *, backend="nccl"):
    """A run with one rank on each host."""
    return seen_of(CHECK, dict(enumerate(hosts)), ranks_per_node=1, gpus=1, options=RunOptions(backend=backend))


def judged(*hosts, **run):
    """The findings of that run."""
    return list(CHECK.judge(seen(hosts, **run)))


def among(odd, others=None, hosts=4, **run):
    """The findings where the second host is another one."""
    usual = host(GOOD) if others is None else others
    return judged(usual, odd, *[usual] * (hosts - 2), **run)


def only(findings):
    (finding,) = findings
    return finding.code.removeprefix("HST007."), finding.severity, finding.hosts


INDEX = {"NCCL_IB_GID_INDEX": "3"}
RULE = {"NCCL_IB_HCA": "=" + ",".join(rail.name for rail in GOOD)}
# The kernel numbers the others on.
SEVEN = tuple(Rail(f"mlx5_{name}", place) for name, place in enumerate((0, 1, 2, 4, 5, 6, 7)))
STORAGE = (Rail("mlx5_8", 8, rate="200 Gb/sec (4X HDR)", board="MT_1"),)
# The odd host, the others, the finding, and the ports that it names.
FAULTS = {
    "down": (host(with_rail(GOOD, 3, **DOWN)), host(GOOD), ("down", *WARNED), ["mlx5_3:1"]),
    "all down": (host(rails(**DOWN)), host(GOOD), ("down", *FAILED), [f"{rail.name}:1" for rail in GOOD]),
    "missing": (host(SEVEN), host(GOOD), ("missing", *WARNED), [f"{rail.name}:1" for rail in SEVEN]),
    "all missing": (host(()), host(GOOD), ("missing", *FAILED), []),
    "missing by NCCL_IB_HCA": (host(GOOD[:7], **RULE), host(GOOD, **RULE), ("missing", *WARNED), None),
    "set to Ethernet": (
        host(with_rail(GOOD, 2, layer="Ethernet", gids=ROCE)),
        host(GOOD),
        ("missing", *WARNED),
        [f"{rail.name}:1" for rail in GOOD],
    ),
    "half the rate": (
        host(with_rail(GOOD, 5, rate="200 Gb/sec (4X HDR)")),
        host(GOOD),
        ("slow", *WARNED),
        ["mlx5_5:1"],
    ),
    "slow beside one that should be": (
        host((*with_rail(GOOD, 5, rate="200 Gb/sec (4X HDR)"), *STORAGE)),
        host((*GOOD, *STORAGE)),
        ("slow", *WARNED),
        ["mlx5_5:1"],
    ),
    "one lane": (host(with_rail(GOOD, 0, rate="100 Gb/sec (1X NDR)")), host(GOOD), ("slow", *WARNED), ["mlx5_0:1"]),
    "no address": (host(with_rail(roce(), 6, gids=LINK_LOCAL)), host(roce()), ("gid", *FAILED), ["mlx5_6:1"]),
    "empty GID index": (
        host(with_rail(roce(), 6, gids=(ROCE[0], ROCE[3])), **INDEX),
        host(roce(), **INDEX),
        ("gid", *FAILED),
        ["mlx5_6:1"],
    ),
    "firmware": (host(with_rail(GOOD, 4, firmware="28.35.2000")), host(GOOD), ("firmware", *WARNED), ["mlx5_4:1"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_its_host_and_ports(fault, golden):
    odd, usual, expected, ports = FAULTS[fault]
    (finding,) = among(odd, usual)
    assert only([finding]) == expected
    assert ports is None or finding.evidence["ports"] == ports
    if fault == "missing":
        assert (finding.evidence["missing"], finding.evidence["missing_pci"]) == (1, ["0000:43:00.0"])
    golden(finding)


def test_a_fault_that_nccl_worked_with_is_no_error():
    run = seen([host(roce()), host(with_rail(roce(), 6, gids=LINK_LOCAL)), *[host(roce())] * 2])
    rows = dict.fromkeys(range(4), Nothing())
    worked = together(run, seen_of(all_reduce.CHECK, rows, params={"backend": "nccl"}, ranks_per_node=1, gpus=1))
    assert only(CHECK.judge(worked)) == ("gid", *WARNED)


@pytest.mark.parametrize(
    ("own", "rule", "severity"),
    [
        (GOOD, "mlx4_0,mthca", Severity.ERROR),
        (with_rail(GOOD, 3, **DOWN), "=mlx5_3:1", Severity.ERROR),
        (GOOD, "^mlx5", Severity.WARNING),
    ],
    ids=["no such name", "a port that is down", "all excluded"],
)
def test_nccl_ib_hca_that_leaves_no_port(own, rule, severity, golden):
    wrong = host(own, NCCL_IB_HCA=rule)
    (finding,) = judged(wrong, wrong)
    assert only([finding]) == ("hca", severity, ("n0", "n1"))
    golden(finding)
    assert only(judged(wrong))[:2] == ("hca", Severity.WARNING)


def test_nccl_ib_hca_that_leaves_no_port_on_one_host_blames_that_host():
    assert only(among(host(GOOD, NCCL_IB_HCA="=mlx5"))) == ("hca", *FAILED)


TWO = ["down", "missing", "half the rate", "one lane", "no address", "firmware"]


@pytest.mark.parametrize("fault", TWO)
def test_two_hosts_that_differ_are_both_named_and_none_is_blamed(fault):
    odd, usual, _, _ = FAULTS[fault]
    (finding,) = judged(usual, odd)
    assert only([finding]) == ("uneven", Severity.NOTE if fault == "firmware" else Severity.WARNING, ())
    assert finding.evidence["hosts"] == ["n0", "n1"]


def test_four_hosts_of_two_kinds_blame_none():
    assert only(judged(*[host(GOOD)] * 2, *[host(GOOD[:4])] * 2)) == ("uneven", Severity.WARNING, ())


@pytest.mark.parametrize("fault", ["down", "half the rate", "one lane", "no address", "firmware"])
def test_a_host_alone_is_compared_with_itself(fault):
    odd, _, (word, _, _), ports = FAULTS[fault]
    (finding,) = judged(odd)
    assert only([finding]) == (word, Severity.WARNING, ("n0",))
    assert finding.evidence["ports"] == ports


FRONTEND = Rail("mlx5_8", 8, "Ethernet", rate="100 Gb/sec (4X EDR)", model="MT4127", board="MT_9", gids=LINK_LOCAL)
VIRTUAL = tuple(Rail(f"mlx5_{9 + number}", number, slot=1, virtual=True, **DOWN) for number in range(4))
EFA = tuple(
    Rail(f"rdmap{n}s27", n, "Unknown", rate="100 Gb/sec (4X EDR)", driver="efa", kind="7: unspecified")
    for n in range(8)
)


DISABLED = (Rail(f"mlx5_{4 + n}", 4 + n, **DOWN | {"physical": "3: Disabled"}) for n in range(4))
HEALTHY = {
    "eight rails": host(GOOD),
    "no RDMA": host(()),
    "a frontend": host((*GOOD, FRONTEND)),
    "a frontend that is down": host((*GOOD, FRONTEND._replace(**DOWN))),
    "a frontend left out": host(GOOD, NCCL_IB_HCA="^mlx5_8"),
    "four disabled": host((*rails(4), *DISABLED)),
    "HDR100 on two lanes": host(rails(rate="100 Gb/sec (2X HDR)")),
    "virtual functions": host((*GOOD, *VIRTUAL)),
    "a bond": host((Rail("mlx5_bond_0", 0, "Ethernet", gids=ROCE),)),
    "EFA": host(EFA, NCCL_IB_HCA="mlx5"),
    "iWARP": host(roce(kind="4: RNIC", driver="irdma", gids=LINK_LOCAL)),
    "GIDs hidden from the container": host(roce(gids=tuple((address, "", "") for address, _, _ in ROCE))),
    "RoCE on one link": host(roce(gids=LINK_LOCAL)),
    "a GID index": host(roce(), NCCL_IB_GID_INDEX="3"),
    "software": host((Rail("rxe0", None, "Ethernet", driver="", gids=ROCE),)),
    "firmware of one release": host(with_rail(GOOD, 4, firmware="28.39.3004")),
}


@pytest.mark.parametrize("own", HEALTHY.values(), ids=HEALTHY)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_that_are_alike_are_silent(own, hosts):
    assert judged(*[own] * hosts) == []


HALF, WHOLE = (structs.replace(own, settings={"NCCL_IB_HCA": "^mlx5_5"}) for own in FAULTS["half the rate"][:2])
RENAMED = tuple(rail._replace(name=f"mlx5_{number}") for number, rail in enumerate((FRONTEND, *GOOD)))


@pytest.mark.parametrize(
    ("odd", "usual"),
    [
        pytest.param(host(RENAMED), host((*GOOD, FRONTEND)), id="names that mean other cards"),
        pytest.param(host((*GOOD, FRONTEND)), host(GOOD), id="more ports"),
        pytest.param(host(with_rail(GOOD, 4, firmware="28.39.3004")), host(GOOD), id="firmware of one release"),
        pytest.param(HALF, WHOLE, id="a port that is left out"),
        pytest.param(host(rails(2), gpus=2, model="0x20b2"), host(GOOD), id="other GPUs"),
    ],
)
def test_a_host_that_differs_for_a_good_reason_is_silent(odd, usual):
    assert among(odd, usual) == []


@pytest.mark.parametrize("fault", TWO)
@pytest.mark.parametrize(
    "settings", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}, {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx4"}]
)
def test_ports_that_nccl_may_not_take_are_not_judged(fault, settings):
    odd, usual = (structs.replace(own, settings=settings) for own in FAULTS[fault][:2])
    assert among(odd, usual) == []
    assert among(*FAULTS[fault][:2], backend="gloo") == []


def test_a_host_that_hides_its_adapters_is_unknown_where_the_job_may_need_them(tmp_path, golden):
    hidden = read_rdma_data({"DDPDIAG_SYSFS": str(tmp_path)}, lambda _: None)
    (finding,) = judged(host(GOOD), hidden)
    assert only([finding]) == ("unreadable", *WARNED)
    assert judged(hidden) == judged(host(GOOD), hidden, backend="gloo") == []
    golden(finding)


@pytest.mark.parametrize(("rdma", "measured"), [((), False), (("mlx5_0",), True), (None, True)])
def test_hosts_without_rdma_are_skipped(rdma, measured):
    before = seen_of(limits.CHECK, dict.fromkeys(range(2), limits.Data(limits=None, rdma=rdma))).of(CHECK)
    assert bool(CHECK.plan(before)) is measured
    assert measured or skip_text(CHECK, before) == "no host has an RDMA device"
