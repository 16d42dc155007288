"""RDZ003: the interface that every host offers."""

import pytest
from meshes import meshed
from msgspec import Raw, structs
from seen import seen_of, skip_text, together, world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.rendezvous import interfaces
from ddpdiag.codec import encode
from ddpdiag.model import Finding, RunOptions, Severity
from ddpdiag.probes.net.interfaces import Ifnames, Interface
from ddpdiag.probes.net.tcp_connect import Reach

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
DOCKER0 = Interface(name="docker0", addresses=("172.17.0.1",))


def host(rank: int = 0, *, gloo: str | None = None, nccl: str | None = None, **more: object) -> interfaces.Data:
    """Host n<rank>, whose name leads to eth0, as does the way to the coordinator."""
    address = f"10.0.0.{rank + 1}"
    values = {
        "interfaces": (LO, Interface(name="eth0", addresses=(address,)), DOCKER0),
        "own_addresses": (address,),
        "variables": Ifnames(gloo, nccl),
        "source_address": address,
    }
    return interfaces.Data(**(values | more))  # type: ignore[arg-type]


def seen(*rows: interfaces.Data, gpus: int = 0) -> Seen[interfaces.Data]:
    return seen_of(interfaces.CHECK, dict(enumerate(rows)), ranks_per_node=1, gpus=gpus)


def judged(*rows: interfaces.Data, gpus: int = 0) -> list[Finding]:
    return list(interfaces.judge(seen(*rows, gpus=gpus)))


@pytest.mark.parametrize(
    "hosts",
    [
        (host(0), host(1), host(2)),
        (host(0, gloo="eth0", nccl="=eth0"), host(1, gloo="eth0", nccl="eth")),
        (host(0), host(1, own_addresses=("127.0.1.1",))),
        (host(0), host(1, own_addresses=())),
    ],
    ids=["without variables", "with variables", "a name that leads to loopback", "a name without an address"],
)
def test_hosts_that_offer_their_own_address_are_silent(hosts):
    assert judged(*hosts) == []


def test_one_host_has_no_ground():
    assert skip_text(interfaces.CHECK, world_of(2, ranks_per_node=2)) is not None


@pytest.mark.parametrize(
    ("variables", "gpus", "severity"),
    [
        pytest.param({"gloo": "eno1"}, 0, Severity.ERROR, id="gloo"),
        pytest.param({"gloo": "^docker0"}, 0, Severity.ERROR, id="NCCL's spelling in gloo's variable"),
        pytest.param({"nccl": "=eth7"}, 0, Severity.WARNING, id="NCCL without GPUs"),
        pytest.param({"nccl": "=eth7"}, 1, Severity.ERROR, id="NCCL with GPUs"),
        pytest.param({"gloo": "eth7"}, 1, Severity.WARNING, id="gloo with GPUs"),
    ],
)
def test_an_interface_that_one_host_does_not_have_names_that_host(golden, variables, gpus, severity):
    (finding,) = judged(host(0), host(1, **variables), gpus=gpus)
    assert (finding.code, finding.severity, finding.hosts) == ("RDZ003.missing", severity, ("n1",))
    golden(finding)


BARE = Interface(name="eth1")


@pytest.mark.parametrize(
    ("variables", "interface", "gpus"),
    [
        pytest.param({"gloo": "eth1"}, BARE, 0, id="no address"),
        pytest.param({"gloo": "eth1"}, Interface(name="eth1", addresses=("10.2.0.1",), running=False), 0, id="down"),
        pytest.param({"gloo": "eth1"}, Interface(name="eth1", addresses=("fe80::1%eth1",)), 0, id="link-local"),
        pytest.param({"gloo": "lo"}, BARE, 0, id="loopback"),
        pytest.param({"nccl": "^docker0"}, BARE, 1, id="loopback by exclusion"),
    ],
)
def test_an_interface_that_others_cannot_use_names_its_host(golden, variables, interface, gpus):
    finding = judged(host(0), host(1, interfaces=(*(host(1).interfaces or ()), interface), **variables), gpus=gpus)[0]
    assert (finding.code, finding.severity, finding.hosts) == ("RDZ003.unusable", Severity.ERROR, ("n1",))
    golden(finding)


def test_docker0_everywhere_is_one_finding_that_names_all_hosts(golden):
    (finding,) = judged(*(host(rank, gloo="docker0") for rank in range(3)))
    assert (finding.code, finding.severity) == ("RDZ003.shared", Severity.ERROR)
    assert finding.hosts == ("n0", "n1", "n2")
    assert finding.evidence == {"address": "172.17.0.1"}
    golden(finding)


def test_containers_that_share_a_machines_network_share_its_address():
    rows = {rank: host(0, network_namespace=42) for rank in range(2)}
    base = seen_of(interfaces.CHECK, rows, ranks_per_node=1)
    one = {rank: structs.replace(a, host_id="boot") for rank, a in base.world.arrivals.items()}
    same = Seen(structs.replace(base.world, arrivals=one), base.check, structs.replace(base.recording, arrivals=one))
    assert list(interfaces.judge(same)) == []
    assert [finding.code for finding in interfaces.judge(base)] == ["RDZ003.shared"]


BRIDGE = "172.30.0.1"
MISSED: dict[str, object] = {"offered_reach": Reach.DROPPED}
REACHED: dict[str, object] = {"address": BRIDGE}


@pytest.mark.parametrize(
    ("ways", "severity"),
    [
        pytest.param((), Severity.WARNING, id="not measured"),
        pytest.param((MISSED,), Severity.ERROR, id="the others could not connect"),
        pytest.param((MISSED, REACHED), None, id="reached at the second try"),
        pytest.param((REACHED, MISSED), None, id="missed at the second try"),
        pytest.param((REACHED,), None, id="reached"),
    ],
)
def test_another_interface_than_that_of_the_route_is_judged_by_who_reached_it(golden, ways, severity):
    """Host 1 offers a bridge, and `ways` is what host 0 saw of it, in turn."""
    bridge = Interface(name="br-9f2", addresses=(BRIDGE,))
    run = seen(host(0), host(1, gloo="br-9f2", interfaces=(*(host(1).interfaces or ()), bridge)))
    if ways:
        mesh = meshed(2, *({(0, 1): way} for way in ways))
        offered = tuple(
            structs.replace(outcome, data=Raw(encode(structs.replace(row.data, offered_address=BRIDGE))))
            for outcome, row in zip(mesh.outcomes, mesh.rows, strict=True)
        )
        run = together(run, Seen(mesh.world, mesh.check, structs.replace(mesh.recording, outcomes=offered)))
    found = list(interfaces.judge(run))
    assert [(finding.code, finding.severity, finding.hosts, finding.evidence["address"]) for finding in found] == [
        ("RDZ003.wrong", severity, ("n1",), BRIDGE)
    ] * (severity is not None)
    golden(*found)


def test_hosts_whose_interfaces_have_different_names_get_no_common_export(golden):
    other = host(1, gloo="eth7", interfaces=(LO, Interface(name="eno1", addresses=("10.0.0.2",))))
    (finding,) = judged(host(0), other)
    assert finding.env == {}
    golden(finding)


def test_interfaces_that_cannot_be_listed_are_unknown():
    (finding,) = judged(host(0), host(1, interfaces=None))
    assert (finding.code, finding.hosts) == ("RDZ003.unreadable", ("n1",))


def test_a_backend_that_was_asked_for_decides_whose_rule_counts():
    options = RunOptions(backend="nccl")
    rows = {0: host(0), 1: host(1, nccl="docker0")}
    (finding,) = interfaces.judge(seen_of(interfaces.CHECK, rows, ranks_per_node=1, options=options))
    assert (finding.code, finding.severity) == ("RDZ003.wrong", Severity.WARNING)
