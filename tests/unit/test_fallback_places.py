"""On which hosts a backend fails, in words and in blame."""

from collections.abc import Sequence

from seen import seen_of

from ddpdiag.checks.p2p.fallback.judge import Places, places
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Kind, Part, Step, Tried
from ddpdiag.checks.run import joined

FAILS = Tried(Step(Part.WHOLE), works=False, how="hung")


def placed(hosts: tuple[tuple[int, ...], ...], *tried: Tried, inside_works: bool = False) -> Places:
    """Of ranks on hosts n0, n1, ... with two each, unless each has one."""
    ranks = [rank for own in hosts for rank in own]
    seen = seen_of(joined.CHECK, {}, size=len(ranks), ranks_per_node=len(hosts[0]))
    ground = Ground(broken=True, slow_below=None, hosts=hosts)
    end = Ended(Kind.NOTHING, inside_works=inside_works)
    return places(seen, (FAILS, *tried), end, ground)


def by_host(good: Sequence[tuple[int, ...]], bad: Sequence[tuple[int, ...]]) -> Tried:
    return Tried(Step(Part.HOSTS), not bad, "hung" if bad else "", failed=tuple(bad), busbws=dict.fromkeys(good, 1e9))


def test_a_host_inside_which_it_fails_while_it_works_inside_others_is_named(golden) -> None:
    found = placed(((0, 1), (2, 3), (4, 5)), by_host(good=[(0, 1), (4, 5)], bad=[(2, 3)]))
    assert (found.hosts, found.concerned) == (("n1",), (2, 3))
    golden(found.text)


def test_where_it_fails_inside_every_host_none_of_them_is_named() -> None:
    assert placed(((0, 1), (2, 3)), by_host(good=[], bad=[(0, 1), (2, 3)])) == Places()


def test_what_works_inside_each_host_fails_between_them(golden) -> None:
    for found in (placed(((0, 1), (2, 3)), inside_works=True), placed(((0,), (1,)))):
        assert found == Places(found.text)
        golden(found.text)
