"""P2P005: an all-reduce far below what NCCL's path can do; when that is an error, and what it says of the cause."""

import pytest
from cards import clocks, pcie
from msgspec import structs
from seen import skip_text
from speeds import GB, H100, PCIE, run, transport_of

from ddpdiag.checks.p2p.speed import CHECK, AllReduceTime, path_of_ranks
from ddpdiag.model import RunOptions, Severity


def judged(*rates, **more):
    return list(CHECK.judge(run(*rates, **more)))


TRAY = structs.replace(H100, nvlink_bytes_per_s=721.8 * GB, nvlink_domain="5f2c.7ffe")
TRAYS = {"size": 8, "on_host": 4, "name": "MNNVL", "links": TRAY}
FAR_BELOW = {
    "twice": (Severity.ERROR, ("n0",), (1.3, 1.28), {}),
    "between hosts, of which none is blamed": (Severity.ERROR, (), (2, 2), {"size": 4, "on_host": 2}),
    # Network cards would not be faster, so their rate is not the limit.
    "NVLinks between hosts": (Severity.ERROR, (), (25, 25), TRAYS),
    "faster without direct copies": (Severity.ERROR, ("n0",), (1.3, 1.3, 22), {}),
    "once only": (Severity.WARNING, ("n0",), (1.3,), {}),
    "fast enough the second time": (Severity.NOTE, (), (1.3, 300), {}),
    "by a variable of NCCL": (Severity.ERROR, ("n0",), (3, 3), {"NCCL_MAX_CTAS": "1", "NCCL_DEBUG": "INFO"}),
}


@pytest.mark.parametrize(("severity", "hosts", "rates", "world"), FAR_BELOW.values(), ids=FAR_BELOW)
def test_an_all_reduce_far_below_its_path_is_found(golden, severity, hosts, rates, world):
    (finding,) = judged(*(rate * GB for rate in rates), **world)
    assert (finding.code, finding.severity) == ("P2P005.far-below", severity)
    assert (finding.hosts, finding.ranks) == (hosts, ())
    golden(finding)


SILENT = {
    "a sixth of what the path can do": (60, {}),
    "a fifth of NVLinks between hosts": (150, TRAYS),
    "TCP between hosts": (0.1, {"size": 4, "on_host": 2, "network": "Socket"}),
    "a plugin of unknown rate": (0.1, {"size": 4, "on_host": 2, "network": "AWS Libfabric"}),
    "NVLinks that may not join all GPUs": (0.1, {"size": 4, "links": structs.replace(H100, nvlink_switched=False)}),
    "as fast as the host's memory can be": (11, {"kind": "SHM", "name": "direct", "NCCL_P2P_DISABLE": "1"}),
}


@pytest.mark.parametrize(("rate", "world"), SILENT.values(), ids=SILENT)
def test_what_promises_no_more_is_silent(rate, world):
    seen = run(rate * GB, **world)
    assert (CHECK.plan(seen), list(CHECK.judge(seen))) == ((), [])


def test_a_slow_all_reduce_is_measured_again_and_a_healthy_one_is_not():
    (trial,) = CHECK.plan(run(1.3 * GB))
    assert (trial.groups, trial.params) == (((0, 1),), {"backend": "nccl", "bytes": 128 << 20})
    assert (trial.env, trial.fresh) == ({}, False)
    assert CHECK.plan(run(1.3 * GB, 300 * GB)) == ()
    expected = "the all-reduce of COL001 reached 87 GB/s busbw at 4 MiB, 25 % of 352 GB/s"
    assert skip_text(CHECK, run(230 * GB)) == expected


def test_a_slow_path_of_direct_copies_is_tried_without_them():
    (trial,) = CHECK.plan(run(1.3 * GB, 1.3 * GB))
    assert (trial.env, trial.fresh) == ({"NCCL_P2P_DISABLE": "1"}, True)
    assert CHECK.plan(run(1.3 * GB, 1.3 * GB, 22 * GB)) == ()
    assert CHECK.plan(run(1.3 * GB, 1.3 * GB, kind="SHM", name="direct")) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"log": False}, "NCCL's log does not show the path"),
        ({"sick": {1: {"memory_used_bytes": 20 << 30}}}, "another process uses GPU 1"),
        ({"sick": {1: {"memory_used_bytes": None, "processes": None}}}, "whether another process uses GPU 1"),
        ({"sick": {1: {"mig": True}}}, "GPU 1 on n0"),
    ],
)
def test_a_doubt_makes_it_a_warning(changes, said):
    (finding,) = judged(1.3 * GB, 1.3 * GB, **changes)
    (doubt,) = finding.evidence["doubts"]
    assert (finding.severity, doubt.startswith(said)) == (Severity.WARNING, True)


@pytest.mark.parametrize(
    ("late", "rate"),
    [
        (AllReduceTime(4 << 20, 2, seconds=2e-3, latency_seconds=1.95e-3), 352 * GB),
        # 4 KiB a rank are no bandwidth.
        (AllReduceTime(4 << 20, 1024, seconds=600e-6, latency_seconds=150e-6), 368 * GB),
    ],
)
def test_latency_is_no_slowness(late, rate):
    assert late.share_of(rate) > 0.1


def test_gloo_and_tcp_promise_nothing():
    assert skip_text(CHECK, run(0.1 * GB, options=RunOptions(backend="gloo")).world) is not None
    tcp = run(0.1 * GB, size=4, on_host=2, network="Socket")
    assert skip_text(CHECK, tcp) == "NCCL sends over TCP sockets, for which no rate is expected"


def rows_of(count, **path):
    return {rank: transport_of(rank, count, count, **path) for rank in range(count)}


def test_through_the_hosts_memory_half_of_pcie_is_expected_and_no_nvlink():
    path = path_of_ranks(rows_of(2, kind="SHM", name="direct"), {"n0": (0, 1)})
    assert path.busbw_bytes_per_s == 24 * GB
    assert path.transports == "SHM/direct"
    assert path_of_ranks(rows_of(2, links=PCIE), {"n0": (0, 1)}).busbw_bytes_per_s == 24 * GB


def path_of_trays(**path):
    rows = {rank: transport_of(rank, 8, 4, **({"name": "MNNVL", "links": TRAY} | path)) for rank in range(8)}
    return path_of_ranks(rows, {"n0": (0, 1, 2, 3), "n1": (4, 5, 6, 7)})


def test_nvlinks_between_hosts_are_the_path_where_nccl_uses_them(golden):
    path = path_of_trays()
    assert path.busbw_bytes_per_s == pytest.approx(0.95 * 721.8 * GB)
    assert (path.bottleneck.name, path.transports, path.log_covers_all_ranks) == ("NVLINK", "P2P/MNNVL", True)
    golden(path.text)


def test_the_network_is_the_path_where_nccls_log_shows_it_between_trays():
    assert path_of_trays(name="CUMEM").busbw_bytes_per_s == pytest.approx(0.92 * 50 * GB)
    assert isinstance(path_of_trays(NCCL_MNNVL_ENABLE="0"), str), "and its log shows no network"
    assert isinstance(path_of_trays(links=H100), str), "NVML knows no domain"


NARROW = {1: pcie(width=4)}


@pytest.mark.parametrize(
    ("rate", "world", "causes"),
    [
        pytest.param(1.3, {"sick": {1: clocks(events=0x8)}}, ["GPU005.slowdown"], id="clocks"),
        pytest.param(0.3, {"links": PCIE, "sick": NARROW}, ["GPU004.narrow"], id="a slot on the path"),
        pytest.param(0.3, {"sick": NARROW}, [], id="a slot beside the path"),
    ],
)
def test_what_slows_the_path_down_is_its_cause(rate, world, causes):
    (finding,) = judged(rate * GB, rate * GB, **world)
    known = [cause for cause in finding.evidence["causes"] if "(GPU00" in cause]
    assert [cause.rpartition("(")[2].rstrip(")") for cause in known] == causes
