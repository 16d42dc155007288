"""MASTER_PORT, judged."""

from msgspec import structs
from seen import seen_of, with_arrivals, world_of

from ddpdiag.checks import rdz005
from ddpdiag.checks.rdz005 import CHECK, Data
from ddpdiag.model import Severity
from ddpdiag.probes.doors import Knock
from ddpdiag.probes.sockets import Reach, Reached


def knocked(reach=Reach.ACCEPTED, *, ours=True, address="10.0.0.1", **more):
    """What a host found that knocked and ended so."""
    ours = ours if reach is Reach.ACCEPTED else None
    reached = Reached(reach=reach, address=address, seconds=0.001)
    return Data(name="n0", port=29500, knock=Knock(reached=reached, ours=ours), **more)


def found(*answers, agent_store=False):
    """The findings where the hosts n0, n1, ... gave these answers."""
    rows = dict(enumerate(answers))
    seen = seen_of(CHECK, rows, ranks_per_node=1, params={"agent_store": agent_store})
    return {finding.code.partition(".")[2]: finding for finding in CHECK.judge(seen)}


DROPPED, REFUSED = knocked(Reach.DROPPED), knocked(Reach.REFUSED)


def test_a_port_that_all_reach_is_silent():
    assert found(knocked(), knocked(), knocked()) == {}


def test_a_port_that_is_held_names_the_holder_and_rank_0s_host_alone():
    taken = Data(name="n0", port=29500, error="EADDRINUSE", holder="pid 8123 (train.py, user bob)")
    nobody_tried = Data(name="n0", port=29500)
    findings = found(taken, nobody_tried)
    assert list(findings) == ["taken"]
    assert (findings["taken"].severity, findings["taken"].nodes) == (Severity.ERROR, ("n0",))
    assert "pid 8123 (train.py, user bob)" in findings["taken"].message


def test_a_port_that_only_root_may_use_is_no_taken_port():
    finding = found(Data(name="n0", port=80, error="EACCES"))["unusable"]
    assert "EACCES" in finding.message
    assert "1024" in finding.remedy


def test_one_host_of_three_that_gets_no_answer_names_the_way_and_neither_end():
    finding = found(knocked(), DROPPED, knocked())["dropped"]
    assert (finding.severity, finding.nodes, finding.links) == (Severity.ERROR, (), ("n1 -> n0",))
    assert "1 of 2 other hosts get there" in finding.message


def test_if_no_other_host_gets_there_rank_0s_is_to_blame():
    finding = found(knocked(), REFUSED, REFUSED)["refused"]
    assert (finding.nodes, finding.links) == (("n0",), ("n1 -> n0", "n2 -> n0"))
    assert "a firewall rejects it" in finding.message


def test_of_two_hosts_neither_is_blamed():
    finding = found(knocked(), DROPPED)["dropped"]
    assert (finding.nodes, finding.links) == ((), ("n1 -> n0",))
    assert "no third host" in finding.message


def test_each_way_of_failing_has_its_finding():
    assert set(found(knocked(), DROPPED, REFUSED, knocked())) == {"dropped", "refused"}


def test_somebody_else_who_answers_is_a_stranger():
    finding = found(knocked(), knocked(ours=False, address="10.0.0.9"), knocked())["stranger"]
    assert "n0:29500 (10.0.0.9)" in finding.message


def test_rank_0_that_cannot_reach_its_own_address_explains_all_others():
    findings = found(knocked(Reach.DROPPED, is_own=True), DROPPED, DROPPED)
    assert list(findings) == ["dropped"]
    assert (findings["dropped"].nodes, findings["dropped"].links) == (("n0",), ())


def test_an_address_that_is_not_rank_0s_leads_elsewhere():
    finding = found(knocked(Reach.REFUSED, is_own=False))["elsewhere"]
    assert finding.nodes == ("n0",)
    assert "none of n0's" in finding.message


def test_an_agents_store_that_nobody_serves_points_at_the_variable():
    finding = found(knocked(Reach.REFUSED, is_own=True), REFUSED, agent_store=True)["nobody"]
    assert "TORCHELASTIC_USE_AGENT_STORE" in finding.message


def test_names_and_loopback_are_left_to_the_check_of_names():
    unknown = knocked(Reach.UNKNOWN_NAME, address=None)
    loopback = knocked(Reach.REFUSED, address="127.0.1.1")
    assert found(knocked(), unknown, loopback, knocked()) == {}


def test_an_ephemeral_port_is_worth_a_word_on_several_hosts_only():
    ephemeral = knocked(ephemeral=(32768, 60999))
    assert found(ephemeral, knocked())["ephemeral"].severity is Severity.INFO
    assert found(ephemeral) == {}


def test_what_cannot_be_used_is_known_to_other_checks():
    assert rdz005.usable(seen_of(CHECK, {0: knocked(), 1: knocked()}, ranks_per_node=1))
    assert not rdz005.usable(seen_of(CHECK, {0: knocked(), 1: DROPPED}, ranks_per_node=1))
    assert rdz005.usable(seen_of(CHECK, {}, size=2))


def test_one_rank_of_each_host_takes_part_rank_0_first():
    seen = seen_of(CHECK, {}, size=6)
    (trial,) = rdz005.plan(before_the_first_trial(seen))
    assert (trial.groups, trial.params) == (((0, 2, 4),), {"agent_store": False})
    assert rdz005.plan(seen) == ()


def test_an_agent_is_known_by_any_rank_that_has_one():
    seen = before_the_first_trial(seen_of(CHECK, {}, size=2))
    arrivals = world_of(2).arrivals
    arrivals = {**arrivals, 1: structs.replace(arrivals[1], agent_store=True)}
    (trial,) = rdz005.plan(with_arrivals(seen, arrivals))
    assert trial.params == {"agent_store": True}


def test_more_hosts_than_can_be_greeted_are_told_apart():
    rows = dict.fromkeys(range(1024), knocked())
    (finding,) = CHECK.judge(seen_of(CHECK, rows, size=2000, ranks_per_node=1, params={"agent_store": False}))
    assert (finding.code, finding.severity) == ("RDZ005.partly", Severity.INFO)


def test_the_slowest_host_stands_in_the_figures():
    figures = rdz005.figures(seen_of(CHECK, {0: knocked(), 1: DROPPED}, ranks_per_node=1))
    assert figures == {"master_port.hosts": 1, "master_port.slowest_seconds": 0.001}


def test_a_host_for_which_the_address_is_its_own_never_asked_rank_0():
    bridge = knocked(Reach.REFUSED, address="172.17.0.1", is_own=True)
    findings = found(knocked(address="172.17.0.1", is_own=True), bridge, bridge)
    assert list(findings) == ["itself"]
    assert (findings["itself"].nodes, findings["itself"].links) == ((), ("n1 -> n0", "n2 -> n0"))
    assert "172.17.0.1" in findings["itself"].message


def test_a_host_that_does_not_know_the_name_has_not_got_there():
    unknown = knocked(Reach.UNKNOWN_NAME, address=None)
    finding = found(knocked(), DROPPED, unknown)["dropped"]
    assert finding.nodes == ()
    assert "of 2 other hosts get there" not in finding.message


def test_strangers_that_all_others_meet_say_nothing_of_rank_0s_host():
    stranger = knocked(ours=False, address="10.0.0.9")
    assert found(knocked(), stranger, stranger)["stranger"].nodes == ()


def test_where_all_ports_are_ephemeral_none_below_is_advised():
    assert "ip_local_reserved_ports=29500" in found(knocked(ephemeral=(1024, 65535)), knocked())["ephemeral"].remedy


def before_the_first_trial(seen):
    """The same run, before the first trial."""
    return type(seen)(seen.world, seen.check, structs.replace(seen.recording, trials=()))
