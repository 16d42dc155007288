"""HST006: what network ports count while a run loads them."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of, skip_text, together

from ddpdiag.checks.host import limits
from ddpdiag.checks.host.network_ports import CHECK, Readings, allowed_rise, port_changes
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.rendezvous import interfaces, links
from ddpdiag.model import RunOptions, Severity, Status
from ddpdiag.probes.net.adapters import NetworkReading, PortCounters
from ddpdiag.probes.net.interfaces import Ifnames, Interface
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.probes.net.tcp_connect import Reach

ERROR, WARNING = Severity.ERROR, Severity.WARNING
THREE = {"size": 3, "ranks_per_node": 1}
RDMA_COUNTERS = {
    "symbol_error": 0,
    "link_error_recovery": 0,
    "link_downed": 0,
    "port_rcv_errors": 0,
    "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 0,
}
ETHERNET_COUNTERS = {"carrier_down_count": 1, "rx_crc_errors": 0, "rx_frame_errors": 0}
LIMITS = partial(allowed_rise, seen_of(CHECK, {}, **THREE))


def nic(name="eth0", *, below=(), up=True, **counters):
    return PortCounters(name=name, up=up, below=below, counters=ETHERNET_COUNTERS | counters)


def rail(name="mlx5_0:1", *, up=True, taken=True, below=(), **counters):
    own = RDMA_COUNTERS | counters
    return PortCounters(name=name, rdma=True, pci="0000:1b:00.0", up=up, used_by_nccl=taken, below=below, counters=own)


def host(*ports, route="eth0", damaged=0, segments=1000):
    return NetworkReading(
        seconds=100.0, ports=ports or (nic(),), route=route, tcp={"InSegs": segments, "InCsumErrors": damaged}
    )


def judged(before, after, *, seconds=30.0, chosen=None, **world):
    """The findings where the second look of each rank (given by rank; others stay as they were) came so much later."""
    place = THREE | world
    begun = dict.fromkeys(range(place["size"]), host()) | before
    later = {rank: structs.replace(look, seconds=100.0 + seconds) for rank, look in (begun | after).items()}
    return list(CHECK.judge(looked_twice(begun, later, chosen, place)))


def looked_twice(begun, later, chosen, place):
    seen = together(seen_of(CHECK, begun, **place), seen_of(CHECK, later, **place))
    return together(seen, seen_of(interfaces.CHECK, chosen, **place)) if chosen else seen


def only(findings):
    (finding,) = findings
    return finding.code.removeprefix("HST006."), finding.severity, finding.hosts


LOST = nic(carrier_down_count=2)
BOND = host(nic("bond0", below=("eth1", "eth2")), nic("eth1"), nic("eth2"), route="bond0")
DOWN = host(nic(up=False))
# The looks of n1 before and after, and the finding.
CHANGES = {
    "old errors": (host(nic(rx_crc_errors=900), rail(link_downed=3, symbol_error=7), damaged=12),) * 2 + (None,),
    "a link that was lost": (host(), host(LOST), ("link-down", ERROR)),
    "a link that stays down": (host(), DOWN, ("link-down", ERROR)),
    "an interface that the job does not use": (
        host(nic(), nic("docker0")), host(nic(), nic("docker0", carrier_down_count=9, rx_crc_errors=999)), None
    ),
    "a member of a bond": (
        BOND, structs.replace(BOND, ports=(BOND.ports[0], nic("eth1", carrier_down_count=2), BOND.ports[2])),
        ("link-down", WARNING)
    ),
    "a bond": (
        BOND, structs.replace(BOND, ports=(nic("bond0", carrier_down_count=2), *BOND.ports[1:])),
        ("link-down", ERROR)
    ),
    "a link that came up": (DOWN, host(), None),
    "an RDMA port that was down": (
        host(nic(), rail(up=False)), host(nic(), rail(up=False, symbol_error=65535, link_downed=2)), None
    ),
    "an RDMA port over gloo": (host(nic(), rail()), host(nic(), rail(link_downed=1)), ("link-down", WARNING)),
    "the interface of an RDMA port": (
        host(nic(), rail(below=("ens1",)), nic("ens1")),
        host(nic(), rail(below=("ens1",)), nic("ens1", rx_crc_errors=50)),
        ("link-errors", WARNING)
    ),
    "an interface that is gone": (host(nic(), rail()), host(rail()), ("gone", ERROR)),
    "segments of an older kernel": (structs.replace(host(), tcp={"InSegs": 5}), host(damaged=99), None),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_port_names_its_host(golden, change):
    before, after, expected = CHANGES[change]
    findings = judged({1: before}, {1: after}, seconds=12.3)
    assert [only([finding]) for finding in findings] == ([] if expected is None else [(*expected, ("n1",))])
    if findings:
        assert findings[0].evidence["seconds"] == 12.3
        golden(*findings)


def test_an_interface_without_a_route_is_used_where_the_library_chooses_it():
    addresses = (Interface(name="eth0", addresses=("10.0.0.1",)), Interface(name="ib0", addresses=("10.1.0.1",)))
    data = interfaces.Data(
        interfaces=addresses, own_addresses=(), variables=Ifnames("ib0", None), source_address="10.0.0.1"
    )
    before, after = host(nic(), nic("ib0")), host(nic(), nic("ib0", carrier_down_count=2))
    assert only(judged({1: before}, {1: after}, chosen={1: data}))[:2] == ("link-down", ERROR)
    assert judged({1: before}, {1: after}) == []


@pytest.mark.parametrize(("taken", "hosts", "severity"), [(True, 3, ERROR), (False, 3, WARNING), (True, 1, WARNING)])
def test_an_rdma_port_is_an_error_where_nccl_takes_it_to_other_hosts(taken, hosts, severity):
    before, after = host(nic(), rail(taken=taken)), host(nic(), rail(taken=taken, link_downed=1))
    findings = judged({hosts // 2: before}, {hosts // 2: after}, size=hosts, gpus=8, options=RunOptions(backend="nccl"))
    assert only(findings) == ("link-down", severity, (f"n{hosts // 2}",))


def test_where_most_hosts_lost_their_links_no_host_is_blamed(golden):
    down = host(LOST)
    (finding,) = judged({}, {0: down, 2: down})
    assert only([finding]) == ("link-down", ERROR, ())
    golden(finding)
    assert len(judged({}, {0: down, 2: down}, size=5)) == 2
    assert only(judged({}, {1: down}, size=2))[2] == ("n1",)


@pytest.mark.parametrize(
    ("counter", "seconds", "most"),
    [
        ("symbol_error", 30, 2),
        ("symbol_error", 600, 20),
        ("link_error_recovery", 30, 5),
        ("port_rcv_errors", 30, 300),
        ("local_link_integrity_errors", 30, 0),
        ("excessive_buffer_overrun_errors", 600, 0),
        ("rx_crc_errors", 30, 2),
        ("rx_frame_errors", 30, 2),
    ],
)
def test_errors_of_a_link_have_a_limit(counter, seconds, most):
    before, normal = (host(nic(), rail(**{counter: number})) for number in (0, most))
    assert judged({1: before}, {1: normal}, seconds=seconds) == []
    (finding,) = judged({1: before}, {1: host(nic(), rail(**{counter: most + 1}))}, seconds=seconds)
    assert only([finding]) == ("link-errors", WARNING, ("n1",))
    assert (finding.evidence["counters"], finding.evidence["after"]) == ([counter], [most + 1])


def test_the_limits_can_be_set():
    options = RunOptions(settings={"HST006.bit_errors_per_hour": "6000", "HST006.damaged_segments": "50"})
    assert judged({}, {1: host(nic(rx_crc_errors=99), damaged=50)}, options=options) == []


def test_several_counters_of_several_ports_are_one_finding_of_the_host(golden):
    before = host(nic(), rail("mlx5_0:1"), rail("mlx5_1:1"))
    after = host(nic(), rail("mlx5_0:1", symbol_error=9, link_error_recovery=6), rail("mlx5_1:1", symbol_error=3))
    (finding,) = judged({1: before}, {1: after})
    assert finding.evidence["ports"] == ["mlx5_0:1", "mlx5_0:1", "mlx5_1:1"]
    assert finding.evidence["after"] == [9, 6, 3]
    golden(finding)


def test_damaged_segments_name_the_host_that_got_them_unless_most_did(golden):
    assert judged({}, {1: host(damaged=3)}) == []
    (finding,) = judged({}, {1: host(damaged=4, segments=3000)})
    assert only([finding]) == ("damaged", WARNING, ("n1",))
    golden(finding)
    (finding,) = judged({}, {0: host(damaged=9), 2: host(damaged=9)})
    assert (finding.hosts, finding.evidence["hosts"]) == ((), ["n0", "n2"])


def sending(sent, again, needless=0):
    counters = {"OutSegs": sent, "RetransSegs": again, "TCPDSACKRecvSegs": needless, "TCPDSACKRecv": needless // 2}
    return structs.replace(host(), tcp=counters)


@pytest.mark.parametrize(
    ("sent", "again", "is_loss"),
    [(10_000, 99, False), (100_000, 900, False), (10_000, 500, True), (0, 100, True)],
    ids=["few", "less than 1 %", "5 %", "all"],
)
def test_loss_that_begins_after_the_links_were_measured_blames_nobody(golden, sent, again, is_loss):
    before, after = sending(1000, 7), sending(1000 + sent, 7 + again)
    found = judged({1: before}, {1: after})
    assert [(finding.code, finding.severity, finding.hosts) for finding in found] == [
        ("HST006.resent", ERROR, ())
    ] * is_loss
    if sent == 10_000 and is_loss:
        golden(*found)


@pytest.mark.parametrize(("needless", "is_loss"), [(500, False), (400, False), (390, True), (900, False)])
def test_segments_that_a_busy_host_sends_again_needlessly_are_not_lost(needless, is_loss):
    found = judged({1: sending(1000, 7, 3)}, {1: sending(11_000, 507, 3 + needless)})
    assert [finding.evidence["resent"] for finding in found] == [[500 - needless]] * is_loss


def test_loss_that_rdz004_measured_is_its_finding():
    looks = {1: sending(0, 0)}, {1: structs.replace(sending(10_000, 500), seconds=130.0)}
    seen = looked_twice(*looks, None, THREE)
    for lost, codes in ((0, ["HST006.resent"]), (50, [])):
        cell = Cell(peer=0, reach=Reach.ACCEPTED, segments=1000, retransmitted=lost)
        data = links.Data(
            offered_address="10.0.0.2", listener_port=1, interfaces=(), ephemeral_ports=None, cells=(cell,)
        )
        found = list(CHECK.judge(together(seen, seen_of(check_by_code("RDZ004"), {1: data}, **THREE))))
        assert [finding.code for finding in found] == codes
        assert all("RDZ004 measured the links before" in finding.message for finding in found)


COUNTS = st.dictionaries(st.sampled_from([*RDMA_COUNTERS, *ETHERNET_COUNTERS, "rx_dropped"]), st.integers(0, 1 << 40))
PORTS = st.lists(
    st.builds(PortCounters, name=st.sampled_from(["eth0", "docker0", "mlx5_0:1"]), rdma=st.booleans(), counters=COUNTS),
    max_size=3,
    unique_by=lambda port: port.name,
).map(tuple)


def pair(before, after):
    looks = NetworkReading(seconds=5.0, ports=before), NetworkReading(seconds=35.0, ports=after)
    return Readings(*looks, frozenset(("eth0", "mlx5_0:1")))


@given(PORTS, st.data())
def test_counters_that_stay_or_fall_are_no_rise(before, data):
    """A fall is a reset, or a counter that wrapped at 32 bits."""
    lower = tuple(
        structs.replace(port, counters={name: data.draw(st.integers(0, most)) for name, most in port.counters.items()})
        for port in before
    )
    assert list(port_changes(pair(before, before), LIMITS)) == list(port_changes(pair(before, lower), LIMITS)) == []


def finally_(seen):
    return replace(seen, is_last=True)


def test_one_rank_of_each_host_looks_first():
    world = seen_of(limits.CHECK, {}, size=6).of(CHECK)
    (trial,) = CHECK.plan(world)
    assert (trial.groups, trial.params) == (((0,), (2,), (4,)), {"towards": "10.0.0.2"})
    assert list(CHECK.judge(world)) == []


def test_a_rank_that_saw_counters_looks_again_once():
    begun = seen_of(CHECK, {0: host(), 1: NetworkReading(seconds=1.0), 2: host()}, params={"towards": "x"}, **THREE)
    assert CHECK.plan(begun) == ()
    (trial,) = CHECK.plan(finally_(begun))
    assert (trial.groups, trial.params) == (((0,), (2,)), {"towards": "x"})
    assert CHECK.plan(finally_(together(begun, seen_of(CHECK, {0: host()}, **THREE)))) == ()


def test_a_host_alone_is_looked_at_unless_it_has_no_rdma(golden):
    for rdma, trials in ((("mlx5_0",), 1), ((), 0)):
        alone = seen_of(limits.CHECK, {0: limits.Data(limits=None, rdma=rdma)}).of(CHECK)
        assert len(CHECK.plan(alone)) == trials
    assert CHECK.plan(finally_(alone)) == ()
    golden(skip_text(CHECK, finally_(alone)))
    assert len(CHECK.plan(seen_of(limits.CHECK, {}).of(CHECK))) == 1


def test_hosts_that_show_nothing_are_said_so(golden):
    blind = finally_(seen_of(CHECK, dict.fromkeys(range(3), NetworkReading(seconds=1.0)), **THREE))
    assert CHECK.plan(blind) == ()
    golden(skip_text(CHECK, blind))


def test_a_second_look_that_hung_is_left_to_run003():
    begun = seen_of(CHECK, dict.fromkeys(range(3), host()), **THREE)
    hung = seen_of(CHECK, {0: host()}, statuses={1: Status.HUNG, 2: Status.HUNG}, **THREE)
    assert list(CHECK.judge(together(begun, hung))) == []


def test_the_report_has_the_last_counters_of_the_ports_that_count():
    tcp = {"OutSegs": 5000, "RetransSegs": 90, "TCPDSACKRecv": 30, "TCPDSACKRecvSegs": 40, "InCsumErrors": 0}
    before = host(nic(), rail(symbol_error=1), nic("docker0", rx_crc_errors=4))
    after = structs.replace(before, ports=(nic(), rail(symbol_error=6), *before.ports[2:]), tcp=tcp)
    rows = CHECK.report(looked_twice({0: host(), 1: before}, {1: after}, None, THREE)).counters
    assert [(row.host, row.part, row.totals) for row in rows] == [
        ("n1", "eth0", {"carrier_down_count": 1}),
        ("n1", "mlx5_0:1", {"symbol_error": 6}),
        ("n1", "TCP", {"sent_segments": 5000, "resent_segments": 90, "needless_segments": 40}),
    ]
