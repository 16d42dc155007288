"""HST007: RDMA ports of hosts that are compared. Every host here is a made-up /sys."""

import pytest
from rails import DOWN, LINK_LOCAL, ROCE, Rail, host, rails, roce, with_rail
from seen import seen_of, skip_text, together

from ddpdiag.checks.api import Nothing
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import present
from ddpdiag.checks.gpu.visibility import Data as Enumerated
from ddpdiag.checks.host import limits
from ddpdiag.checks.host.rdma_ports.check import CHECK, look
from ddpdiag.checks.launch import variables
from ddpdiag.checks.rendezvous import interfaces
from ddpdiag.model import Options, Severity
from ddpdiag.probes.gpu.nvml import Enumeration, Gpu
from ddpdiag.probes.net.interfaces import Interface, Wanted

GOOD = rails()


def seen(hosts, *, backend="nccl", chosen=None):
    """A run with one rank on each host."""
    world = {"size": len(hosts), "ranks_per_node": 1, "gpus": 1, "options": Options(backend=backend)}
    own = seen_of(CHECK, dict(enumerate(hosts)), **world)
    return together(own, seen_of(interfaces.CHECK, chosen, **world)) if chosen else own


def judged(*hosts, **run):
    """The findings of that run."""
    return list(CHECK.judge(seen(hosts, **run)))


def among(odd, others=None, hosts=4, **run):
    """The findings where the second host is another one."""
    usual = host(GOOD) if others is None else others
    return judged(usual, odd, *[usual] * (hosts - 2), **run)


def only(findings):
    (finding,) = findings
    return finding.code.removeprefix("HST007."), finding.severity, finding.nodes


WARNED, FAILED = (Severity.WARNING, ("n1",)), (Severity.ERROR, ("n1",))

# Sick hosts among others ----------------------------------------------------------------------------------------------


def test_a_port_that_is_down_is_named_with_its_state(golden):
    (finding,) = among(host(with_rail(GOOD, 3, **DOWN)))
    assert only([finding]) == ("down", *WARNED)
    assert finding.evidence == {"ports": ["mlx5_3:1"], "states": ["DOWN (Polling)"], "ports_up": 7}
    golden(finding)


def test_a_port_without_a_subnet_manager_and_one_that_was_disabled_have_other_fixes(golden):
    (no_manager,) = among(host(with_rail(GOOD, 3, state="2: INIT")))
    (disabled,) = among(host(with_rail(GOOD, 3, **DOWN | {"physical": "3: Disabled"})))
    golden(no_manager.fix, disabled.fix)


def test_a_host_without_a_port_that_is_up_breaks_the_job():
    assert only(among(host(rails(**DOWN)))) == ("down", *FAILED)


def test_a_missing_adapter_is_named_by_its_place(golden):
    # The kernel numbers the others on.
    seven = tuple(Rail(f"mlx5_{name}", place) for name, place in enumerate((0, 1, 2, 4, 5, 6, 7)))
    (finding,) = among(host(seven))
    assert only([finding]) == ("missing", *WARNED)
    assert (finding.evidence["missing"], finding.evidence["missing_pci"]) == (1, ["0000:43:00.0"])
    golden(finding)


def test_a_host_without_adapters_breaks_the_job():
    (finding,) = among(host(()))
    assert only([finding]) == ("missing", *FAILED)
    assert finding.evidence["missing"] == 8


def test_a_port_that_is_set_to_ethernet_is_missing_among_those_of_infiniband(golden):
    (finding,) = among(host(with_rail(GOOD, 2, layer="Ethernet", gids=ROCE)))
    assert only([finding])[0] == "missing"
    golden(finding)


def test_a_port_at_half_its_rate_is_slow(golden):
    (finding,) = among(host(with_rail(GOOD, 5, rate="200 Gb/sec (4X HDR)")))
    assert only([finding]) == ("slow", *WARNED)
    assert finding.evidence["ports"] == ["mlx5_5:1"]
    assert (finding.evidence["bytes_per_s"], finding.evidence["expected_bytes_per_s"]) == ([25e9], [50e9])
    golden(finding)


def test_the_slow_one_is_told_from_those_that_are_meant_to_be_slow():
    storage = (Rail("mlx5_8", 8, rate="200 Gb/sec (4X HDR)", board="MT_1"),)
    (finding,) = among(host((*with_rail(GOOD, 5, rate="200 Gb/sec (4X HDR)"), *storage)), host((*GOOD, *storage)))
    assert (finding.code, finding.evidence["ports"]) == ("HST007.slow", ["mlx5_5:1"])


def test_a_narrow_port_has_lost_lanes(golden):
    (finding,) = among(host(with_rail(GOOD, 0, rate="100 Gb/sec (1X NDR)")))
    assert only([finding]) == ("narrow", *WARNED)
    assert (finding.evidence["lanes"], finding.evidence["expected_lanes"]) == ([1], [4])
    golden(finding)


def test_lanes_of_ethernet_only_follow_from_its_speed():
    odd = host(with_rail(roce(), 0, rate="25 Gb/sec (1X EDR)"))
    assert only(among(odd, host(roce(rate="100 Gb/sec (4X EDR)"))))[0] == "slow"


def test_a_roce_port_whose_interface_has_no_address_cannot_be_connected(golden):
    (finding,) = among(host(with_rail(roce(), 6, gids=LINK_LOCAL)), host(roce()))
    assert only([finding]) == ("gid", *FAILED)
    assert (finding.evidence["ports"], finding.evidence["interfaces"]) == (["mlx5_6:1"], ["eth2"])
    golden(finding)


def test_a_roce_port_with_older_gids_only_is_found():
    old = tuple(gid for gid in ROCE if gid[1] != "RoCE v2")
    (finding,) = among(host(roce(gids=old)), host(roce()))
    assert (finding.code, len(finding.evidence["ports"])) == ("HST007.gid", 8)


def test_firmware_of_another_release_is_a_warning(golden):
    (finding,) = among(host(with_rail(GOOD, 4, firmware="28.35.2000")))
    assert only([finding]) == ("firmware", *WARNED)
    assert (finding.evidence["adapters"], finding.evidence["expected"]) == (["mlx5_4"], "28.39")
    golden(finding)


def test_gpus_whose_adapters_are_on_the_other_socket_are_far(golden):
    crossed = tuple(rail._replace(place=(number + 4) % 8) for number, rail in enumerate(GOOD[:4]))
    (finding,) = among(host(crossed[:2], gpus=2), host(GOOD[:2], gpus=2))
    assert only([finding]) == ("far", *WARNED)
    assert (finding.evidence["nearest"], finding.evidence["expected"]) == (["SYS", "SYS"], ["PIX", "PIX"])
    golden(finding)


def test_what_nccl_did_all_the_same_is_no_error():
    run = seen([host(roce()), host(with_rail(roce(), 6, gids=LINK_LOCAL)), *[host(roce())] * 2])
    world = {"size": 4, "ranks_per_node": 1, "gpus": 1}
    rows = dict.fromkeys(range(4), Nothing())
    worked = together(run, seen_of(all_reduce.CHECK, rows, params={"backend": "nccl"}, **world))
    assert only(CHECK.judge(worked)) == ("gid", *WARNED)


# Variables ------------------------------------------------------------------------------------------------------------


def test_names_that_match_nothing_leave_sockets(golden):
    wrong = host(GOOD, NCCL_IB_HCA="mlx4_0,mthca")
    (finding,) = judged(wrong, wrong)
    assert only([finding]) == ("hca", Severity.ERROR, ("n0", "n1"))
    golden(finding)


def test_a_name_that_matches_nothing_on_one_host_blames_that_host():
    assert only(among(host(GOOD, NCCL_IB_HCA="=mlx5"))) == ("hca", *FAILED)


def test_names_of_ports_that_are_all_down_leave_sockets(golden):
    down = host(with_rail(GOOD, 3, **DOWN), NCCL_IB_HCA="=mlx5_3:1")
    (finding,) = judged(down, down)
    assert only([finding])[:2] == ("hca", Severity.ERROR)
    golden(finding)


def test_who_excludes_all_ports_may_mean_it():
    none = host(GOOD, NCCL_IB_HCA="^mlx5")
    assert only(judged(none, none))[:2] == ("hca", Severity.WARNING)


def test_a_variable_for_adapters_that_no_host_has_is_a_warning(golden):
    bare = host((), NCCL_IB_HCA="mlx5")
    (finding,) = judged(bare, bare)
    assert only([finding]) == ("hca", Severity.WARNING, ())
    golden(finding)


def test_one_name_of_several_that_no_host_has_is_a_warning(golden):
    typo = host(GOOD, NCCL_IB_HCA="mlx5_0:1,mlx5_1:1,mlx_2:1")
    (finding,) = judged(typo, typo)
    assert only([finding]) == ("unmatched", Severity.WARNING, ())
    assert finding.evidence["name"] == "mlx_2:1"
    golden(finding)


def test_a_name_that_only_one_host_lacks_is_a_missing_port():
    rule = "=" + ",".join(rail.name for rail in GOOD)
    findings = among(host(GOOD[:7], NCCL_IB_HCA=rule), host(GOOD, NCCL_IB_HCA=rule))
    assert only(findings)[0] == "missing"


def test_a_gid_index_that_is_empty_on_one_host_fails_there(golden):
    odd = host(with_rail(roce(), 6, gids=(ROCE[0], ROCE[3])), NCCL_IB_GID_INDEX="3")
    (finding,) = among(odd, host(roce(), NCCL_IB_GID_INDEX="3"))
    assert only([finding]) == ("gid-index", *FAILED)
    assert (finding.evidence["ports"], finding.evidence["gid_types"]) == (["mlx5_6:1"], ["none"])
    golden(finding)


def test_a_gid_index_that_means_another_type_than_on_most_hosts_fails():
    odd = host(roce(gids=(ROCE[0], ROCE[1], ROCE[3], ROCE[2])), NCCL_IB_GID_INDEX="3")
    (finding,) = among(odd, host(roce(), NCCL_IB_GID_INDEX="3"))
    assert (finding.code, set(finding.evidence["gid_types"])) == ("HST007.gid-index", {"IB/RoCE v1"})


# Two hosts, and one ---------------------------------------------------------------------------------------------------

SICK = {
    "down": with_rail(GOOD, 3, **DOWN),
    "missing": GOOD[:7],
    "slow": with_rail(GOOD, 3, rate="200 Gb/sec (4X HDR)"),
    "narrow": with_rail(GOOD, 3, rate="100 Gb/sec (1X NDR)"),
    "firmware": with_rail(GOOD, 3, firmware="28.35.2000"),
}


@pytest.mark.parametrize("state", SICK)
def test_two_hosts_that_differ_are_both_named_and_none_is_blamed(state, golden):
    (finding,) = judged(host(GOOD), host(SICK[state]))
    expected = Severity.NOTE if state == "firmware" else Severity.WARNING
    assert only([finding]) == ("uneven", expected, ())
    assert finding.evidence["hosts"] == ["n0", "n1"]
    golden(finding)


def test_two_hosts_whose_roce_ports_differ_are_both_named():
    findings = judged(host(roce()), host(with_rail(roce(), 3, gids=LINK_LOCAL)))
    assert only(findings) == ("uneven", Severity.WARNING, ())


def test_four_hosts_of_two_kinds_blame_none():
    assert only(judged(*[host(GOOD)] * 2, *[host(GOOD[:4])] * 2)) == ("uneven", Severity.WARNING, ())


@pytest.mark.parametrize("state", ["down", "slow", "narrow", "firmware"])
def test_a_host_alone_is_compared_with_itself(state, golden):
    (finding,) = judged(host(SICK[state]))
    assert only([finding]) == (state, Severity.WARNING, ("n0",))
    golden(finding)


def test_a_host_alone_with_one_roce_port_that_has_no_address_is_warned():
    assert only(judged(host(with_rail(roce(), 6, gids=LINK_LOCAL)))) == ("gid", Severity.WARNING, ("n0",))


def test_a_single_lane_of_infiniband_needs_no_peer():
    assert only(judged(host(rails(1, rate="50 Gb/sec (1X HDR)")))) == ("narrow", Severity.WARNING, ("n0",))


def test_wrong_names_on_a_host_alone_are_a_warning():
    assert only(judged(host(GOOD, NCCL_IB_HCA="mlx6")))[:2] == ("hca", Severity.WARNING)


# Healthy hosts --------------------------------------------------------------------------------------------------------

FRONTEND = Rail("mlx5_8", 8, "Ethernet", rate="100 Gb/sec (4X EDR)", model="MT4127", board="MT_9", gids=LINK_LOCAL)
VIRTUAL = tuple(Rail(f"mlx5_{9 + number}", number, slot=1, virtual=True, **DOWN) for number in range(4))
EFA = tuple(
    Rail(f"rdmap{n}s27", n, "Unknown", rate="100 Gb/sec (4X EDR)", driver="efa", kind="7: unspecified")
    for n in range(8)
)


@pytest.mark.parametrize(
    "own",
    [
        host(GOOD),
        host(()),
        host((*GOOD, FRONTEND)),
        host((*GOOD, FRONTEND._replace(**DOWN))),
        host(GOOD, NCCL_IB_HCA="^mlx5_8"),
        host((*rails(4), *(Rail(f"mlx5_{4 + n}", 4 + n, **DOWN | {"physical": "3: Disabled"}) for n in range(4)))),
        host(rails(rate="100 Gb/sec (2X HDR)")),
        host((*GOOD, *VIRTUAL)),
        host((Rail("mlx5_bond_0", 0, "Ethernet", gids=ROCE),)),
        host(EFA, NCCL_IB_HCA="mlx5"),
        host(roce(kind="4: RNIC", driver="irdma", gids=LINK_LOCAL)),
        host(roce(gids=tuple((address, "", "") for address, _, _ in ROCE))),
        host(roce(gids=LINK_LOCAL)),
        host(roce(), NCCL_IB_GID_INDEX="3"),
        host(rails(net="ib0")),
        host((Rail("rxe0", None, "Ethernet", driver="", gids=ROCE),)),
    ],
    ids=[
        "eight rails",
        "no RDMA",
        "a frontend",
        "a frontend that is down",
        "a frontend left out",
        "four disabled",
        "HDR100 on two lanes",
        "virtual functions",
        "a bond",
        "EFA",
        "iWARP",
        "GIDs hidden from the container",
        "RoCE on one link",
        "a GID index",
        "IPoIB",
        "software",
    ],
)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_that_are_alike_are_silent(own, hosts):
    assert judged(*[own] * hosts) == []


def test_firmware_of_one_release_may_differ():
    assert among(host(with_rail(GOOD, 4, firmware="28.39.3004"))) == []
    assert judged(host(with_rail(GOOD, 4, firmware="28.39.3004"))) == []


def test_names_that_mean_other_cards_on_another_host_are_silent():
    usual = host((*GOOD, FRONTEND))
    order = (FRONTEND, *GOOD)
    renamed = host(tuple(rail._replace(name=f"mlx5_{number}") for number, rail in enumerate(order)))
    assert among(renamed, usual) == []


def test_a_host_with_more_ports_is_at_no_fault():
    assert among(host((*GOOD, FRONTEND))) == []


@pytest.mark.parametrize("state", SICK)
@pytest.mark.parametrize(
    "settings", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}, {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx4"}]
)
def test_ports_that_nccl_may_not_take_are_not_judged(state, settings):
    assert among(host(SICK[state], **settings), host(GOOD, **settings)) == []


def test_a_port_that_is_left_out_is_not_judged():
    rule = "^mlx5_3"
    for own in SICK.values():
        assert {f.code for f in among(host(own, NCCL_IB_HCA=rule), host(GOOD, NCCL_IB_HCA=rule))} <= {"HST007.missing"}
    assert among(host(SICK["slow"], NCCL_IB_HCA=rule), host(GOOD, NCCL_IB_HCA=rule)) == []


def test_hosts_with_other_gpus_may_have_other_networks():
    big, small = host(GOOD), host(rails(2), gpus=2, model="0x20b2")
    assert judged(big, small, big, big) == []


def test_a_virtual_machine_without_switches_is_silent():
    flat = host(tuple(Rail(f"mlx5_{number}", 0, slot=number + 1) for number in range(3)), gpus=1)
    assert judged(flat, flat, flat) == []
    assert CHECK.report(seen([flat])).columns == {}


# Sockets, /sys that is not there, and no RDMA at all ------------------------------------------------------------------

ETH2 = Interface(name="eth2", addresses=("10.0.0.1",))
OFFER = interfaces.Data(interfaces=(ETH2,), own_addresses=("10.0.0.1",), names=Wanted("eth2", None), source="10.0.0.1")


def test_a_job_over_gloo_is_judged_by_the_port_below_its_interface():
    run = {"backend": "gloo", "chosen": dict.fromkeys(range(4), OFFER)}
    usual, slow = host(roce(1)), host(roce(1, rate="100 Gb/sec (4X EDR)"))
    assert only(among(slow, usual, **run)) == ("slow", *WARNED)
    assert among(host(()), usual, **run) == []
    assert among(host(with_rail(GOOD, 3, **DOWN)), backend="gloo") == []


def test_a_host_that_hides_its_adapters_is_unknown_where_the_job_may_need_them(tmp_path, golden):
    hidden = look({"DDPDIAG_SYSFS": str(tmp_path)}, lambda _: None)
    (finding,) = judged(host(GOOD), hidden)
    assert only([finding]) == ("unreadable", *WARNED)
    assert judged(hidden) == judged(host(GOOD), hidden, backend="gloo") == []
    golden(finding)


@pytest.mark.parametrize(
    ("rdma", "named", "measured"),
    [((), False, False), ((), True, True), (("mlx5_0",), False, True), (None, False, True)],
)
def test_hosts_without_rdma_are_skipped_unless_a_variable_asks_for_it(rdma, named, measured):
    world = {"size": 2, "ranks_per_node": 1, "gpus": 1}
    rows = dict.fromkeys(range(2), limits.Data(limits=None, rdma=rdma))
    chosen = variables.Data({}, {"/etc/nccl.conf": {"NCCL_IB_HCA": "mlx5"}} if named else {})
    own = seen_of(CHECK, {}, **world)
    empty = together(
        seen_of(limits.CHECK, rows, **world), seen_of(variables.CHECK, dict.fromkeys(range(2), chosen), **world)
    )
    before = type(own)(own.world, CHECK, empty.recording)
    assert bool(CHECK.plan(before)) is measured
    assert measured or skip_text(CHECK, before) == "no host has an RDMA device"


# What is shown --------------------------------------------------------------------------------------------------------


def test_figures_show_the_weakest_host():
    run = seen([host(GOOD), host(with_rail(with_rail(GOOD, 3, **DOWN), 0, rate="200 Gb/sec (4X HDR)"))])
    assert CHECK.report(run).figures == {"rdma.ports": 7, "rdma.min_port_bytes_per_s": 25e9, "rdma.farthest_gpu": "PIX"}
    assert CHECK.report(seen([host(())])).figures == {}


def test_each_rank_is_shown_the_port_that_is_nearest_to_its_gpu():
    own = seen([host(GOOD)])
    gpu = Gpu(index=0, uuid="GPU-a", pci="0000:34:00.0", name="NVIDIA H100 80GB HBM3")
    enumerated = Enumerated(nvml=Enumeration(gpus=(gpu,)))
    world = {"size": 1, "ranks_per_node": 1, "gpus": 1}
    assert CHECK.report(together(own, seen_of(present.CHECK, {0: enumerated}, **world))).columns == {
        0: {"nic": "mlx5_2:1 PIX"}
    }
