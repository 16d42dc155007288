"""MASTER_PORT, judged."""

import pytest
from seen import seen_of, unseen

from ddpdiag.checks.rendezvous import master_port
from ddpdiag.checks.rendezvous.master_port import CHECK, Data
from ddpdiag.model import Severity
from ddpdiag.probes.net.tcp_connect import Attempt, PortCheckResult, Reach


def knocked(reach=Reach.ACCEPTED, *, ours=True, address="10.0.0.1", port=29500, **more):
    """What a host found that knocked and ended so."""
    ours = ours if reach is Reach.ACCEPTED else None
    reached = Attempt(reach=reach, address=address, seconds=0.001)
    return Data(
        name="head.cluster", port=port, port_check=PortCheckResult(reached=reached, listener_answered=ours), **more
    )


def found(*answers, agent_store=False):
    """The findings where the hosts n0, n1, ... gave these answers."""
    rows = dict(enumerate(answers))
    seen = seen_of(CHECK, rows, ranks_per_node=1, params={"agent_store": agent_store})
    return {finding.code.partition(".")[2]: finding for finding in CHECK.judge(seen)}


OPEN, DROPPED, REFUSED = knocked(), knocked(Reach.DROPPED), knocked(Reach.REFUSED)
NO_ROUTE = knocked(Reach.UNREACHABLE)
STRANGER = knocked(ours=False, address="10.0.0.9")
UNKNOWN = knocked(Reach.UNKNOWN_NAME, address=None)
BRIDGE = knocked(Reach.REFUSED, address="172.17.0.1", is_own=True)


@pytest.mark.parametrize(
    "answers",
    [(OPEN, OPEN, OPEN), (OPEN, UNKNOWN, knocked(Reach.REFUSED, address="127.0.1.1"), OPEN)],
    ids=["all reach it", "names and loopback are RDZ002's"],
)
def test_a_port_that_all_reach_is_silent(answers):
    assert found(*answers) == {}


@pytest.mark.parametrize(
    ("port", "error", "holder", "word"),
    [
        pytest.param(29500, "EADDRINUSE", "pid 8123 (train.py, user bob)", "taken", id="held by a process"),
        pytest.param(80, "EACCES", None, "unusable", id="that only root may use"),
    ],
)
def test_a_port_that_cannot_be_used_names_its_process_or_rank_0s_host_alone(golden, port, error, holder, word):
    findings = found(
        Data(name="head.cluster", port=port, error=error, holder=holder), Data(name="head.cluster", port=port)
    )
    assert list(findings) == [word]
    nodes = () if word == "taken" else ("n0",)  # a process holds the port: the host itself is healthy
    assert (findings[word].severity, findings[word].hosts, findings[word].links) == (Severity.ERROR, nodes, ())
    why = {"holder": holder, "host": "n0"} if holder else {"error": error}
    assert findings[word].evidence == {"port": port} | why
    golden(findings[word])


@pytest.mark.parametrize(
    ("answers", "word", "hosts", "links"),
    [
        pytest.param((OPEN, DROPPED, OPEN), "dropped", (), ("n1 -> n0",), id="one of three gets no answer"),
        pytest.param((OPEN, REFUSED, REFUSED), "refused", ("n0",), ("n1 -> n0", "n2 -> n0"), id="no other gets there"),
        pytest.param((OPEN, DROPPED), "dropped", (), ("n1 -> n0",), id="of two neither is blamed"),
        pytest.param((OPEN, DROPPED, UNKNOWN), "dropped", (), ("n1 -> n0",), id="one does not know the name"),
        pytest.param((OPEN, NO_ROUTE, OPEN), "unreachable", (), ("n1 -> n0",), id="one of three has no route"),
        pytest.param((OPEN, STRANGER, OPEN), "other-process", (), ("n1 -> n0",), id="another process answers"),
        pytest.param(
            (OPEN, STRANGER, STRANGER), "other-process", (), ("n1 -> n0", "n2 -> n0"), id="it answers all others"
        ),
        pytest.param(
            (knocked(Reach.DROPPED, is_own=True), DROPPED, DROPPED), "dropped", ("n0",), (),
            id="rank 0 cannot reach its own address, which explains all others",
        ),
        pytest.param(
            (knocked(Reach.REFUSED, address="10.0.0.9", is_own=False),), "elsewhere", ("n0",), (),
            id="the address is not rank 0's",
        ),
        pytest.param(
            (knocked(address="172.17.0.1", is_own=True), BRIDGE, BRIDGE), "itself", (), ("n1 -> n0", "n2 -> n0"),
            id="the address is also the others' own, so they never asked rank 0",
        ),
    ],
)  # fmt: skip
def test_who_is_named_where_hosts_do_not_get_there(golden, answers, word, hosts, links):
    findings = found(*answers)
    assert list(findings) == [word]
    assert (findings[word].severity, findings[word].hosts, findings[word].links) == (Severity.ERROR, hosts, links)
    golden(findings[word])


def test_an_agents_store_that_nobody_serves_points_at_the_variable(golden):
    findings = found(knocked(Reach.REFUSED, is_own=True), REFUSED, agent_store=True)
    assert list(findings) == ["no-agent"]
    golden(findings["no-agent"])


def test_what_cannot_be_used_is_known_to_other_checks():
    assert master_port.is_usable(seen_of(CHECK, {0: OPEN, 1: OPEN}, ranks_per_node=1))
    assert not master_port.is_usable(seen_of(CHECK, {0: OPEN, 1: DROPPED}, ranks_per_node=1))
    assert master_port.is_usable(seen_of(CHECK, {}, size=2))


def test_one_rank_of_each_host_takes_part_rank_0_first():
    seen = seen_of(CHECK, {}, size=6)
    (trial,) = master_port.plan(unseen(CHECK, seen.world))
    assert (trial.groups, trial.params) == (((0, 2, 4),), {"agent_store": False})
    assert master_port.plan(seen) == ()


def test_more_hosts_than_can_be_greeted_are_told_apart():
    rows = dict.fromkeys(range(1024), OPEN)
    (finding,) = CHECK.judge(seen_of(CHECK, rows, size=2000, ranks_per_node=1, params={"agent_store": False}))
    assert (finding.code, finding.severity) == ("RDZ005.partly", Severity.NOTE)
