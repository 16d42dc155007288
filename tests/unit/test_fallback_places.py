"""On which hosts a backend fails, in words and in blame."""

from seen import seen_of

from ddpdiag.checks.p2p.fallback.check import Places, places
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Kind, Part, Step, Tried
from ddpdiag.checks.run import joined

FAILS = Tried(Step(Part.WHOLE), how="hung", failed=((0,),))


def placed(hosts: tuple[tuple[int, ...], ...], *tried: Tried, inside_works: bool = False) -> Places:
    """Of ranks on hosts n0, n1, ... with two each, unless each has one."""
    ranks = [rank for own in hosts for rank in own]
    seen = seen_of(joined.CHECK, {}, size=len(ranks), ranks_per_node=len(hosts[0]))
    ground = Ground(broken=True, hosts=hosts)
    end = Ended(Kind.NOTHING, inside_works=inside_works)
    return places(seen, (FAILS, *tried), end, ground)


def by_host(*bad: tuple[int, ...]) -> Tried:
    return Tried(Step(Part.HOSTS), "hung" if bad else "", failed=bad)


def test_a_host_inside_which_it_fails_while_it_works_inside_others_is_named(golden) -> None:
    found = placed(((0, 1), (2, 3), (4, 5)), by_host((2, 3)))
    assert (found.hosts, found.concerned) == (("n1",), (2, 3))
    golden(found.text)


def test_where_it_fails_inside_every_host_none_of_them_is_named() -> None:
    assert placed(((0, 1), (2, 3)), by_host((0, 1), (2, 3))) == Places()


def test_what_works_inside_each_host_fails_between_them(golden) -> None:
    for found in (placed(((0, 1), (2, 3)), inside_works=True), placed(((0,), (1,)))):
        assert found == Places(found.text)
        golden(found.text)
