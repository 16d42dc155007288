"""RDZ007: clocks of the hosts."""

from collections.abc import Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import meshed
from seen import world_of

from ddpdiag.checks.api import Seen
from ddpdiag.checks.rendezvous import clocks as rdz007
from ddpdiag.model import Finding, Options, Recording, Severity
from ddpdiag.model.recording import Header


def judged(*clocks: float, cut: Container[tuple[int, int]] = (), **world: object) -> list[Finding]:
    """Hosts n0, n1, ... with these clocks; nothing is known over the ways in `cut`."""
    size = len(clocks)
    offsets = {
        (a, b): {"offset_seconds": None if (a, b) in cut else clocks[b] - clocks[a]}
        for a in range(size)
        for b in range(size)
        if a != b
    }
    mesh = meshed(size, offsets, **world)  # type: ignore[arg-type]
    return list(rdz007.judge(Seen(mesh.world, rdz007.CHECK, mesh.recording)))


def test_clocks_that_agree_are_silent():
    assert judged(0.0, 0.5, -0.7) == []


@pytest.mark.parametrize(
    ("clocks", "node", "ahead"),
    [((0.0, 10.0, 0.0), "n1", 10.0), ((0.0, 0.0, -3.0), "n2", -3.0)],
    ids=["ahead", "behind"],
)
def test_a_clock_that_is_off_names_its_host_and_by_how_much(golden, clocks, node, ahead):
    (finding,) = judged(*clocks)
    assert (finding.code, finding.severity, finding.nodes) == ("RDZ007.off", Severity.WARNING, (node,))
    assert finding.evidence["ahead_seconds"] == ahead
    golden(finding)


def test_of_two_hosts_none_is_blamed(golden):
    (finding,) = judged(0.0, 10.0)
    assert (finding.code, finding.nodes) == ("RDZ007.off", ())
    assert finding.evidence == {"difference_seconds": 10.0, "hosts": ["n0", "n1"]}
    golden(finding)


def test_without_a_majority_nobody_is_blamed():
    (finding,) = judged(0.0, 0.0, 10.0, 10.0)
    assert finding.nodes == ()


def test_the_limit_can_be_set():
    assert judged(0.0, 10.0, 0.0, settings={"RDZ007.off_seconds": "30"}) == []


@given(st.integers(3, 10), st.data())
@settings(max_examples=40, deadline=None)
def test_a_minority_with_a_wrong_clock_is_named_exactly(size, data):
    odd = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=(size - 1) // 2))
    clocks = [data.draw(st.floats(-0.5, 0.5)) + (100.0 * (rank + 1) if rank in odd else 0.0) for rank in range(size)]
    named = [node for finding in judged(*clocks) for node in finding.nodes]
    assert named == [f"n{rank}" for rank in sorted(odd)]


def without_mesh(**options: object) -> list[Finding]:
    world = world_of(2, ranks_per_node=1, options=Options(**options))  # type: ignore[arg-type]
    header = Header(run_id="hand", world_size=2, launcher="hand", options=world.options, created="", version="0")
    return list(rdz007.judge(Seen(world, rdz007.CHECK, Recording(header=header, arrivals=world.arrivals))))


def test_clocks_that_were_asked_for_and_not_compared_are_unknown():
    (finding,) = without_mesh(select=("RDZ007",))
    assert finding.code == "RDZ007.unreadable"
    assert without_mesh() == []


def between(one: set[int], other: set[int]) -> set[tuple[int, int]]:
    return {way for a in one for b in other for way in ((a, b), (b, a))}


def test_hosts_that_reach_few_others_are_not_off_for_that():
    assert judged(*[0.0] * 6, cut=between({0}, {2, 3, 4, 5})) == []


def test_groups_that_do_not_reach_each_other_have_nothing_to_compare():
    assert judged(*[0.0] * 6, cut=between({0, 1, 2}, {3, 4, 5})) == []
    assert judged(*[0.0] * 6, cut=between({0, 1}, {2, 3, 4, 5})) == []


def test_a_small_group_apart_that_disagrees_in_itself_blames_nobody(golden):
    (finding,) = judged(0.0, 30.0, 0.0, 0.0, 0.0, 0.0, cut=between({0, 1}, {2, 3, 4, 5}))
    assert (finding.nodes, finding.evidence["hosts"]) == ((), ["n0", "n1"])
    golden(finding)
