"""RDZ004: the mesh between hosts, judged."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import DROPPED, REFUSED, SILENT, STUCK, UNREACHABLE, cell, every, losing, meshed, slow
from msgspec import structs
from seen import seen_of, skip_text, together, with_arrivals, world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host import network_ports
from ddpdiag.checks.rendezvous import mesh, methods
from ddpdiag.checks.rendezvous.links import merge_cells, usual_rate
from ddpdiag.model import Arrival, Event, EventKind, Finding, Kind, Outcome, Severity, Status
from ddpdiag.probes.net.adapters import NetworkReading, PortCounters
from ddpdiag.probes.net.tcp_connect import Reach

BOTH_WAYS = ("n0 -> n1", "n1 -> n0")


def judged(seen: Seen[mesh.Data]) -> list[Finding]:
    return list(mesh.judge(seen))


def only(seen: Seen[mesh.Data]) -> Finding:
    (finding,) = judged(seen)
    return finding


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(meshed(3, {}), id="healthy"),
        pytest.param(meshed(3, every(3, slow(400e6), sender=1)), id="more than a third of the usual rate"),
        pytest.param(meshed(4, every(4, slow(6e9)) | {(0, 1): slow(1e9)}), id="a busy core explains the difference"),
        pytest.param(meshed(4, {(0, 1): slow(5e9), (1, 0): slow(5e9)}), id="half of the hosts are faster"),
        pytest.param(meshed(3, every(3, losing(0.0005), receiver=1)), id="little loss"),
        pytest.param(meshed(3, {(0, 1): slow(12e6)}, {(1, 2): slow(12e6)}), id="slow once"),
        pytest.param(meshed(3, {(0, 1): DROPPED}, {}), id="failed once"),
        pytest.param(meshed(3, every(3, SILENT, receiver=1), ended={1: Status.HUNG}), id="to a host without answer"),
    ],
)
def test_a_mesh_without_a_fault_is_silent(seen):
    assert judged(seen) == []


def test_one_host_alone_has_no_ground():
    assert skip_text(mesh.CHECK, world_of(4, ranks_per_node=4)) is not None
    assert skip_text(mesh.CHECK, world_of(4, ranks_per_node=2)) is None


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (DROPPED, "dropped"),
        (REFUSED, "refused"),
        (SILENT, "silent"),
        (STUCK, "black-hole"),
        (UNREACHABLE, "unreachable"),
    ],
)
def test_a_host_whose_ways_are_all_bad_is_named(golden, fault, word):
    finding = only(meshed(3, every(3, fault, sender=1, receiver=1)))
    assert (finding.code, finding.severity, finding.hosts) == (f"RDZ004.{word}", Severity.ERROR, ("n1",))
    golden(finding)


@pytest.mark.parametrize(
    ("seen", "word", "hosts", "links"),
    [
        pytest.param(meshed(4, every(4, DROPPED, receiver=2)), "dropped", ("n2",), (), id="an incoming firewall"),
        pytest.param(meshed(4, every(4, REFUSED, sender=2)), "refused", ("n2",), (), id="an outgoing firewall"),
        pytest.param(meshed(3, {(0, 2): DROPPED}), "dropped", (), ("n0 -> n2",), id="a single way"),
        pytest.param(meshed(3, every(3, DROPPED)), "dropped", (), (), id="all ways"),
        pytest.param(
            meshed(2, every(2, DROPPED)), "dropped", (), BOTH_WAYS, id="two hosts, which cannot tell"
        ),
        pytest.param(
            meshed(3, {}, {(1, 2): DROPPED, (2, 1): DROPPED}, at_end=True), "dropped", (), ("n1 -> n2", "n2 -> n1"),
            id="a link that was cut during the run",
        ),
        pytest.param(
            meshed(4, {(a, b): DROPPED for a in range(4) for b in range(4) if (a < 2) != (b < 2)}), "dropped", (), (),
            id="groups that do not reach each other",
        ),
    ],
)  # fmt: skip
def test_who_is_named_of_hosts_that_do_not_reach_each_other(golden, seen, word, hosts, links):
    finding = only(seen)
    assert (finding.code, finding.severity) == (f"RDZ004.{word}", Severity.ERROR)
    assert (finding.hosts, finding.links) == (hosts, links)
    golden(finding)


@pytest.mark.parametrize(
    ("statuses", "tested"),
    [
        pytest.param((Status.HUNG, Status.HUNG, Status.HUNG), True, id="all wait"),
        pytest.param((Status.DONE, Status.DONE, Status.DONE), False, id="all is well"),
        pytest.param((Status.HUNG, Status.DIED, Status.HUNG), False, id="a process ended"),
    ],
)
def test_links_are_tested_again_at_the_end_if_ranks_waited_for_each_other(statuses, tested):
    first = meshed(3, {})
    trial = structs.replace(first.trials[0], number=1, code="COL001", kind=Kind.TORCH, params={})
    waited = tuple(
        Outcome(trial=1, code="COL001", rank=rank, status=status, step_count=5) for rank, status in enumerate(statuses)
    )
    recording = structs.replace(first.recording, trials=(*first.trials, trial), outcomes=(*first.outcomes, *waited))
    seen = Seen(first.world, mesh.CHECK, recording)
    assert mesh.plan(seen) == ()
    assert bool(mesh.plan(replace(seen, is_last=True))) == tested


@pytest.mark.parametrize(("gpus", "severity"), [(0, Severity.WARNING), (1, Severity.ERROR)])
def test_a_way_that_gloo_does_not_need_is_a_warning_to_a_job_over_gloo(golden, gpus, severity):
    ranks = {rank: methods.Data("tcp", 0.1) for rank in range(3)}
    met = seen_of(methods.CHECK, ranks, params={"backend": "gloo"}, gpus=gpus, ranks_per_node=1)
    finding = only(together(Seen(met.world, mesh.CHECK, closed().recording), met))
    assert (finding.code, finding.severity, finding.hosts) == ("RDZ004.dropped", severity, ("n2",))
    golden(finding)


def closed() -> Seen[mesh.Data]:
    """Three hosts, of which the last lets nobody in."""
    return meshed(3, every(3, DROPPED, receiver=2))


@pytest.mark.parametrize(
    ("seen", "word", "severity", "hosts", "links"),
    [
        pytest.param(
            meshed(3, every(3, slow(12e6), sender=1, receiver=1)), "slow", Severity.ERROR, ("n1",), (),
            id="both directions",
        ),
        pytest.param(meshed(3, every(3, slow(12e6), sender=1)), "slow", Severity.ERROR, ("n1",), (), id="from it"),
        pytest.param(meshed(3, every(3, slow(12e6), receiver=1)), "slow", Severity.ERROR, ("n1",), (), id="to it"),
        pytest.param(
            meshed(2, {(0, 1): slow(12e6)}), "slow", Severity.ERROR, (), ("n0 -> n1",), id="one direction of two hosts"
        ),
        pytest.param(
            meshed(3, every(3, slow(200e6), sender=1)), "slow", Severity.WARNING, ("n1",), (),
            id="a third of the usual rate",
        ),
        pytest.param(meshed(2, every(2, slow(12e6))), "slow", Severity.WARNING, (), BOTH_WAYS, id="under a gigabit"),
        pytest.param(
            meshed(3, every(3, slow(12e6) | losing(0.05), receiver=1)), "slow", Severity.ERROR, ("n1",), (),
            id="loses as well",
        ),
        pytest.param(
            meshed(3, *[every(3, losing(0.005), receiver=1)] * 2), "loss", Severity.WARNING, ("n1",), (), id="loss"
        ),
    ],
)  # fmt: skip
def test_a_slow_host_or_link_is_named_with_its_direction(golden, seen, word, severity, hosts, links):
    finding = only(seen)
    assert (finding.code, finding.severity) == (f"RDZ004.{word}", severity)
    assert (finding.hosts, finding.links) == (hosts, links)
    golden(finding)


def test_slow_everywhere_needs_an_expectation(golden):
    low = every(3, slow(100e6))
    assert judged(meshed(3, low)) == []
    finding = only(meshed(3, low, settings={"RDZ004.expected_bytes_per_s": "1.2e9"}))
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ())
    finding = only(meshed(3, low, nominal=12.5e9))
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ())
    golden(finding)


def test_loss_of_one_percent_is_an_error_on_the_interface_of_the_job(golden):
    lossy = every(3, losing(0.02), receiver=1)
    finding = only(meshed(3, lossy, every(3, losing(0.03), receiver=1)))
    assert (finding.code, finding.severity, finding.hosts) == ("RDZ004.loss", Severity.ERROR, ("n1",))
    assert finding.evidence["lost_share"] == pytest.approx(0.02)
    golden(finding)
    assert only(meshed(3, lossy)).severity is Severity.WARNING  # not repeated
    assert only(meshed(3, lossy, every(3, losing(0.005), receiver=1))).severity is Severity.WARNING
    elsewhere = every(3, losing(0.02) | {"address": "192.168.0.1", "offered_reach": Reach.DROPPED}, receiver=1)
    assert only(meshed(3, elsewhere, elsewhere)).severity is Severity.WARNING


def test_loss_of_one_percent_on_a_slow_link_is_an_error():
    lossy = every(3, slow(0.2e9) | losing(0.02), receiver=1)
    assert [(f.code, f.severity) for f in judged(meshed(3, lossy, lossy))] == [("RDZ004.slow", Severity.ERROR)]
    few = every(3, slow(0.2e9) | losing(0.005), receiver=1)
    assert [(f.code, f.severity) for f in judged(meshed(3, few, few))] == [("RDZ004.slow", Severity.WARNING)]


def test_loss_where_nccl_takes_an_rdma_port_is_a_warning():
    lossy = every(3, losing(0.02), receiver=1)
    seen = meshed(3, lossy, lossy)
    arrivals = {rank: structs.replace(own, gpus=1) for rank, own in seen.world.arrivals.items()}
    on_gpus = with_arrivals(seen, arrivals)
    assert only(on_gpus).severity is Severity.ERROR
    for taken, severity in ((True, Severity.WARNING), (False, Severity.ERROR)):
        port = PortCounters(name="mlx5_0:1", rdma=True, used_by_nccl=taken)
        looks = seen_of(
            network_ports.CHECK,
            {rank: NetworkReading(seconds=0.0, ports=(port,)) for rank in arrivals},
            ranks_per_node=1,
        )
        assert only(together(on_gpus, looks)).severity is severity


def test_a_rate_that_a_cancelled_run_measured_once_is_no_finding():
    once = meshed(3, {(0, 1): slow(0.2e9), (1, 2): losing(0.05)})
    assert [finding.code for finding in judged(once)] == ["RDZ004.slow", "RDZ004.loss"]
    told = Event(seconds=9.0, kind=EventKind.SIGNAL, rank=0, detail="15")
    assert judged(Seen(once.world, mesh.CHECK, structs.replace(once.recording, events=(told,)))) == []


@pytest.mark.parametrize(
    ("seen", "is_tried"),
    [
        pytest.param(meshed(3), True, id="first"),
        pytest.param(meshed(3, {(0, 1): STUCK}), True, id="stuck"),
        pytest.param(meshed(3, {(0, 1): slow(12e6)}), True, id="slow"),
        pytest.param(meshed(3, {(0, 1): losing(0.05)}), True, id="loses"),
        pytest.param(meshed(3, *[{(0, 1): STUCK}] * 2), False, id="no third time"),
        pytest.param(meshed(3, {}), False, id="all is well"),
        pytest.param(meshed(3, every(3, DROPPED)), False, id="all is closed"),
        pytest.param(meshed(3, {(0, 1): STUCK}, ended={2: Status.HUNG}), False, id="a rank failed"),
    ],
)
def test_one_rank_of_each_host_takes_part_and_a_doubtful_way_is_tried_again(seen, is_tried):
    assert [trial.groups for trial in mesh.plan(seen)] == [((0, 1, 2),)] * is_tried


@given(st.integers(2, 1000))
def test_large_worlds_are_measured_in_groups_of_at_most_64(hosts):
    groups = mesh._groups(range(hosts))
    assert sorted(rank for group in groups for rank in group) == list(range(hosts))
    assert all(2 <= len(group) <= mesh.MAX_HOSTS for group in groups)


def test_the_measurements_say_how_many_pairs_were_looked_at():
    figures = mesh.report(meshed(3, {(0, 1): slow(5e8)})).figures
    assert figures["mesh.pairs"] == "3 of 3"
    assert figures["mesh.min_bytes_per_s"] == 5e8
    assert figures["mesh.median_bytes_per_s"] == 1e9
    assert mesh.report(meshed(3)).figures == {}


faults = st.sampled_from([{}, DROPPED, REFUSED, SILENT, STUCK, slow(1e7), losing(0.1)])


@given(faults, faults)
def test_the_better_of_two_does_not_depend_on_their_order(one, other):
    assert merge_cells(cell(1, **one), cell(1, **other)) == merge_cells(cell(1, **other), cell(1, **one))


@given(st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda way: way[0] != way[1]), faults))
@settings(max_examples=40, deadline=None)
def test_errors_blame_hosts_that_have_a_bad_way_only(bad):
    touched = {f"n{end}" for way, fault in bad.items() if fault for end in way}
    for finding in judged(meshed(5, bad)):
        assert touched.issuperset(finding.hosts)
        assert all(set(link.split(" -> ")) <= touched for link in finding.links)


def test_the_usual_rate_is_what_most_hosts_reach():
    cells = {(0, 1): cell(1, **slow(10.0)), (1, 0): cell(0, **slow(10.0)), (0, 2): cell(2, **slow(30.0))}
    assert usual_rate(cells) == 30.0
    assert usual_rate({(0, 1): cell(1, reach=Reach.DROPPED)}) is None


def on_machines(*machines: str) -> dict[int, Arrival]:
    """Containers n0, n1, ... of one rank each, on these machines."""
    arrivals = world_of(len(machines), ranks_per_node=1).arrivals
    return {rank: structs.replace(arrivals[rank], host_id=machine) for rank, machine in enumerate(machines)}


def test_what_containers_of_one_machine_reach_is_not_expected_of_the_network():
    network = {(a, b): slow(1.1e8) for a in range(4) for b in range(4) if a // 2 != b // 2}
    assert judged(meshed(4, network, arrivals=on_machines("one", "one", "two", "two"))) == []
    assert judged(meshed(4, network, arrivals=on_machines("one", "one", "one", "one"))) != []


def test_a_slow_machine_among_containers_is_still_found():
    ways = [(a, b) for a in range(6) for b in range(6) if a // 2 != b // 2]
    network = {way: slow(4e7 if {4, 5} & {*way} else 1.1e9) for way in ways}
    findings = judged(meshed(6, network, arrivals=on_machines("a", "a", "b", "b", "c", "c")))
    assert {node for finding in findings for node in finding.hosts} == {"n4", "n5"}
