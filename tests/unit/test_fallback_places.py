"""On which hosts a backend fails, in words and in blame."""

from seen import seen_of

from ddpdiag.checks.p2p.fallback.check import FaultPlace, fault_place
from ddpdiag.checks.p2p.fallback.search import EndKind, Grouping, Result, SearchEnd, SearchInput, Step
from ddpdiag.checks.run import roll_call

FAILS = Result(Step(Grouping.ALL_RANKS), failure="hung", failed_groups=((0,),))


def placed(hosts: tuple[tuple[int, ...], ...], *tried: Result, hosts_work: bool = False) -> FaultPlace:
    """Of ranks on hosts n0, n1, ... with two each, unless each has one."""
    ranks = [rank for own in hosts for rank in own]
    seen = seen_of(roll_call.CHECK, {}, size=len(ranks), ranks_per_node=len(hosts[0]))
    ground = SearchInput(failed_before=True, hosts=hosts)
    end = SearchEnd(EndKind.NOTHING, hosts_work=hosts_work)
    return fault_place(seen, (FAILS, *tried), end, ground)


def by_host(*bad: tuple[int, ...]) -> Result:
    return Result(Step(Grouping.EACH_HOST), "hung" if bad else "", failed_groups=bad)


def test_a_host_inside_which_it_fails_while_it_works_inside_others_is_named(golden) -> None:
    found = placed(((0, 1), (2, 3), (4, 5)), by_host((2, 3)))
    assert (found.hosts, found.ranks) == (("n1",), (2, 3))
    golden(found.text)


def test_where_it_fails_inside_every_host_none_of_them_is_named() -> None:
    assert placed(((0, 1), (2, 3)), by_host((0, 1), (2, 3))) == FaultPlace()


def test_what_works_inside_each_host_fails_between_them(golden) -> None:
    for found in (placed(((0, 1), (2, 3)), hosts_work=True), placed(((0,), (1,)))):
        assert found == FaultPlace(found.text)
        golden(found.text)
