"""P2P005: an all-reduce far below what NCCL's path can do; when that is an error, and what it says of the cause."""

import pytest
from cards import clocks, pcie
from msgspec import structs
from seen import skip_text
from speeds import GB, H100, PCIE, run, transport_of

from ddpdiag.checks.p2p.speed import CHECK, Timed, path_of
from ddpdiag.model import Options, Severity


def judged(*rates, **more):
    return list(CHECK.judge(run(*rates, **more)))


def only(*rates, **more):
    (finding,) = judged(*rates, **more)
    return finding


def doubts(*rates, **more):
    finding = only(*rates, **more)
    assert finding.severity is Severity.WARNING
    return finding.evidence["doubts"]


# What is an error -----------------------------------------------------------------------------------------------------


def test_two_measurements_far_below_the_path_of_nccls_log_are_an_error(golden):
    finding = only(1.3 * GB, 1.28 * GB)
    assert (finding.code, finding.severity) == ("P2P005.far-below", Severity.ERROR)
    assert (finding.hosts, finding.ranks) == (("n0",), ())
    assert finding.evidence["doubts"] == []
    golden(finding)


def test_a_sixth_of_what_the_path_can_do_is_no_error():
    assert judged(60 * GB) == []
    assert CHECK.plan(run(60 * GB)) == ()


def test_between_hosts_no_host_is_blamed():
    finding = only(2 * GB, 2 * GB, size=4, on_host=2)
    assert (finding.severity, finding.hosts, finding.ranks) == (Severity.ERROR, (), ())
    assert finding.evidence["expected_bytes_per_s"] == pytest.approx(0.92 * 50 * GB)


# What is measured -----------------------------------------------------------------------------------------------------


def test_a_slow_all_reduce_is_measured_again_and_a_healthy_one_is_not():
    (trial,) = CHECK.plan(run(1.3 * GB))
    assert (trial.groups, trial.params) == (((0, 1),), {"backend": "nccl", "bytes": 128 << 20})
    assert (trial.env, trial.fresh) == ({}, True)
    assert CHECK.plan(run(1.3 * GB, 300 * GB)) == ()
    assert (
        skip_text(CHECK, run(230 * GB)) == "the all-reduce of COL001 reached 87 GB/s busbw at 4 MiB, 25 % of 352 GB/s"
    )


def test_a_slow_path_of_direct_copies_is_tried_without_them():
    (trial,) = CHECK.plan(run(1.3 * GB, 1.3 * GB))
    assert (trial.env, trial.fresh) == ({"NCCL_P2P_DISABLE": "1"}, True)
    assert CHECK.plan(run(1.3 * GB, 1.3 * GB, 22 * GB)) == ()
    assert CHECK.plan(run(1.3 * GB, 1.3 * GB, kind="SHM", name="direct")) == ()


def test_a_path_without_direct_copies_that_is_faster_is_the_cause_and_the_fix(golden):
    finding = only(1.3 * GB, 1.3 * GB, 22 * GB)
    assert finding.severity is Severity.ERROR
    assert "NCCL_P2P_DISABLE=1" in finding.fix
    golden(finding)


# What is a warning only -----------------------------------------------------------------------------------------------


def test_what_was_measured_once_is_a_warning(golden):
    assert doubts(1.3 * GB) == ["it was measured once only"]
    golden(only(1.3 * GB))


def test_a_second_measurement_that_is_fast_enough_makes_it_a_note(golden):
    finding = only(1.3 * GB, 300 * GB)
    assert finding.severity is Severity.NOTE
    golden(finding)


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
    (doubt,) = doubts(1.3 * GB, 1.3 * GB, **changes)
    assert doubt.startswith(said)


# What is not judged ---------------------------------------------------------------------------------------------------


def test_tcp_between_hosts_promises_nothing():
    seen = run(0.1 * GB, size=4, on_host=2, network="Socket")
    assert (CHECK.plan(seen), list(CHECK.judge(seen))) == ((), [])
    assert skip_text(CHECK, seen) == "NCCL sends over TCP sockets, for which no rate is expected"


@pytest.mark.parametrize(
    ("rate", "changes"),
    [
        (0.1, {"size": 4, "on_host": 2, "network": "AWS Libfabric"}),
        (0.1, {"size": 4, "links": structs.replace(H100, nvlink_switched=False)}),
        (11, {"kind": "SHM", "name": "direct", "NCCL_P2P_DISABLE": "1"}),
    ],
    ids=["a plugin of unknown rate", "NVLinks that may not join all GPUs", "as fast as the host's memory can be"],
)
def test_what_promises_no_more_is_silent(rate, changes):
    assert judged(rate * GB, **changes) == []


@pytest.mark.parametrize(
    ("late", "rate"),
    [
        (Timed(4 << 20, 2, seconds=2e-3, latency_seconds=1.95e-3), 352 * GB),
        (Timed(4 << 20, 1024, seconds=600e-6, latency_seconds=150e-6), 368 * GB),  # 4 KiB a rank are no bandwidth
    ],
)
def test_latency_is_no_slowness(late, rate):
    assert late.share_of(rate) > 0.1


def test_gloo_promises_nothing():
    assert skip_text(CHECK, run(0.1 * GB, options=Options(backend="gloo")).world) is not None


# What the path can do -------------------------------------------------------------------------------------------------


def rows_of(count, **path):
    return {rank: transport_of(rank, count, count, **path) for rank in range(count)}


def test_through_the_hosts_memory_half_of_pcie_is_expected_and_no_nvlink():
    path = path_of(rows_of(2, kind="SHM", name="direct"), {"n0": (0, 1)})
    assert path.busbw_bytes_per_s == 24 * GB
    assert path.transports == "SHM/direct"
    assert path_of(rows_of(2, links=PCIE), {"n0": (0, 1)}).busbw_bytes_per_s == 24 * GB


TRAY = structs.replace(H100, nvlink_bytes_per_s=721.8 * GB, nvlink_domain="5f2c.7ffe")


def path_of_trays(**path):
    rows = {rank: transport_of(rank, 8, 4, **({"name": "MNNVL", "links": TRAY} | path)) for rank in range(8)}
    return path_of(rows, {"n0": (0, 1, 2, 3), "n1": (4, 5, 6, 7)})


def test_nvlinks_between_hosts_are_the_path_where_nccl_uses_them(golden):
    path = path_of_trays()
    assert path.busbw_bytes_per_s == pytest.approx(0.95 * 721.8 * GB)
    assert (path.part.name, path.transports, path.by_log) == ("NVLINK", "P2P/MNNVL", True)
    golden(path.text)


def test_the_network_is_the_path_where_nccls_log_shows_it_between_trays():
    assert path_of_trays(name="CUMEM").busbw_bytes_per_s == pytest.approx(0.92 * 50 * GB)
    assert isinstance(path_of_trays(NCCL_MNNVL_ENABLE="0"), str), "and its log shows no network"
    assert isinstance(path_of_trays(links=H100), str), "NVML knows no domain"


def test_an_all_reduce_far_below_nvlinks_between_hosts_is_found_though_its_cards_would_not_be_faster():
    trays = {"size": 8, "on_host": 4, "name": "MNNVL"}
    finding = only(25 * GB, 25 * GB, links=TRAY, **trays)
    assert finding.severity is Severity.ERROR
    assert finding.evidence["expected_bytes_per_s"] == pytest.approx(0.95 * 721.8 * GB)
    assert judged(150 * GB, links=TRAY, **trays) == []


# Causes ---------------------------------------------------------------------------------------------------------------


def causes(*rates, **more):
    return only(*rates, **more).evidence["causes"]


def test_variables_that_nccl_was_given_are_the_cause(golden):
    finding = only(3 * GB, 3 * GB, NCCL_MAX_CTAS="1", NCCL_DEBUG="INFO")
    assert finding.evidence["causes"] == ["NCCL_MAX_CTAS=1 limits NCCL"]
    golden(finding)


def test_clocks_that_are_held_down_are_a_cause():
    (cause,) = causes(1.3 * GB, 1.3 * GB, sick={1: clocks(events=0x8)})
    assert cause.endswith("(GPU005.slowdown)")


def test_a_narrow_slot_is_a_cause_where_pcie_is_the_path_and_no_other():
    narrow = {1: pcie(width=4)}
    assert any("GPU004.narrow" in cause for cause in causes(0.3 * GB, 0.3 * GB, links=PCIE, sick=narrow))
    assert causes(0.3 * GB, 0.3 * GB, sick=narrow) == []
