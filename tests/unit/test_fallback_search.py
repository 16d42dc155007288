"""The fallback search, played against worlds in which certain things do not work."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.checks.p2p.fallback import search
from ddpdiag.checks.p2p.fallback.variables import BETWEEN_HOSTS, INSIDE_HOSTS, interface_overrides

P2P, _, _, NVLS, _ = INSIDE_HOSTS
MNNVL, GDR, _, PLUGIN, IB = BETWEEN_HOSTS
ONE_HOST = ((0, 1, 2, 3),)
TWO_HOSTS = ((0, 1), (2, 3))
NO_ALGO = search.Override("no NCCL_ALGO", {"NCCL_ALGO": None}, "NCCL_ALGO=Tree")
NO_P2P = search.Override("no NCCL_P2P_DISABLE", {"NCCL_P2P_DISABLE": None}, "NCCL_P2P_DISABLE=1")

# How often the step was tried before, and what came of it.
Answer = Callable[[search.Step, int], search.Result]


def facts(**changes: object) -> search.SearchInput:
    known = search.SearchInput(failed_before=True, hosts=ONE_HOST, inside_hosts=INSIDE_HOSTS)
    return known._replace(**changes)  # type: ignore[arg-type]


def groups_of(known: search.SearchInput, step: search.Step) -> tuple[tuple[int, ...], ...]:
    match step.grouping:
        case search.Grouping.ALL_RANKS:
            return (tuple(rank for ranks in known.hosts for rank in ranks),)
        case search.Grouping.EACH_HOST:
            return known.hosts


def played(
    known: search.SearchInput, answer: Answer, most: int = 60
) -> tuple[search.SearchEnd, tuple[search.Result, ...]]:
    """Climb to the end; every plan is made from scratch, as the coordinator does."""
    answers: dict[tuple[str, str], list[search.Result]] = {}
    for _ in range(most):
        step, tried = search.replay(known, answers)
        if isinstance(step, search.SearchEnd):
            return step, tried
        before = answers.setdefault(step.key, [])
        before.append(answer(step, len(before)))
    raise AssertionError("it goes on for ever")


def broken_unless(
    known: search.SearchInput, *needed: frozenset[str], pair: tuple[int, ...] = (), how: str = "hung"
) -> Answer:
    """It hangs in every group, or those that hold `pair`, unless all members of one of these sets are there."""

    def answer(step: search.Step, _before: int) -> search.Result:
        names = {member.name for member in step.overrides}
        mended = any(names >= own for own in needed)
        groups = groups_of(known, step)
        failed = () if mended else tuple(group for group in groups if set(pair) <= set(group))
        return search.Result(step, how if failed else "", None if failed else 1e9, failed)

    return answer


def names(members: Sequence[search.Override]) -> list[str]:
    return [member.name for member in members]


@pytest.mark.parametrize("override", INSIDE_HOSTS, ids=lambda override: override.name)
def test_the_one_that_is_needed_is_found_alone(override: search.Override) -> None:
    known = facts()
    end, tried = played(known, broken_unless(known, frozenset({override.name})))
    assert (end.kind, names(end.overrides)) == (search.EndKind.FOUND, [override.name])
    assert len(end.runs) == search.CONFIRMED
    assert all(run.works and run.step.overrides == end.overrides for run in end.runs)
    assert tried[0].step == search.Step(search.Grouping.ALL_RANKS)


def test_the_users_own_override_is_taken_away_alone() -> None:
    known = facts(user_variables=(NO_ALGO, NO_P2P))
    end, tried = played(known, broken_unless(known, frozenset({NO_ALGO.name})))
    assert (end.kind, names(end.overrides)) == (search.EndKind.FOUND, [NO_ALGO.name])
    assert search.Step(search.Grouping.ALL_RANKS, end.overrides).env == {"NCCL_ALGO": None}
    assert names(tried[1].step.overrides) == [NO_ALGO.name, NO_P2P.name]


def test_nothing_helps() -> None:
    known = facts()
    end, tried = played(known, broken_unless(known))
    assert (end.kind, end.overrides) == (search.EndKind.NOTHING, ())
    assert [one.step.set_name for one in tried if one.step.grouping is search.Grouping.ALL_RANKS] == [
        "", "P2P", "P2P + CUMEM_HOST", "P2P + CUMEM_HOST + SHM", "P2P + CUMEM_HOST + SHM + NVLS",
        "P2P + CUMEM_HOST + SHM + NVLS + CUMEM",
    ]  # fmt: skip


def test_what_works_inside_each_host_is_looked_for_between_them() -> None:
    known = facts(hosts=TWO_HOSTS, between_hosts=BETWEEN_HOSTS, alternatives=interface_overrides(("eth0", "eth1")))

    def answer(step: search.Step, before: int) -> search.Result:
        if step.grouping is search.Grouping.EACH_HOST:
            return search.Result(step, busbw=1e9)
        return broken_unless(known, frozenset({IB.name}))(step, before)

    end, tried = played(known, answer)
    assert (end.kind, names(end.overrides), end.hosts_work) == (search.EndKind.FOUND, [IB.name], True)
    assert not any(member in INSIDE_HOSTS for one in tried for member in one.step.overrides)


def test_what_the_error_names_is_no_end_of_the_search() -> None:
    known = facts(named_in_errors=(NVLS,), inside_hosts=(NVLS, *(each for each in INSIDE_HOSTS if each is not NVLS)))
    end, tried = played(known, broken_unless(known, frozenset({"SHM"})))
    assert names(end.overrides) == ["SHM"]
    failed = [one.step.set_name for one in tried if one.step.overrides and not one.works]
    assert failed == ["NVLS", "NVLS + P2P", "NVLS + P2P + CUMEM_HOST"], "no set fails twice"


def test_a_set_that_is_known_to_fail_does_not_run_again() -> None:
    known = facts()
    end, tried = played(known, broken_unless(known, frozenset({"P2P", "SHM"})))
    assert names(end.overrides) == ["P2P", "SHM"]
    failed = [one.step.set_name for one in tried if not one.works and one.step.grouping is search.Grouping.ALL_RANKS]
    assert failed == ["", "P2P", "P2P + CUMEM_HOST", "CUMEM_HOST + SHM"]


def test_interfaces_are_tried_one_at_a_time() -> None:
    known = facts(
        hosts=((0,), (1,)),
        inside_hosts=(),
        between_hosts=(GDR,),
        alternatives=interface_overrides(("eth0", "eth1", "ib0")),
    )
    end, tried = played(known, broken_unless(known, frozenset({"IFNAME eth1"})))
    assert names(end.overrides) == ["IFNAME eth1"]
    assert search.Step(search.Grouping.ALL_RANKS, end.overrides).env == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert not any("ib0" in one.step.set_name for one in tried)
    assert not any(one.step.grouping is search.Grouping.EACH_HOST for one in tried)


@settings(deadline=None)
@given(st.data(), st.sampled_from([ONE_HOST, TWO_HOSTS, ((0,), (1,)), ((0, 1, 2),)]))
def test_what_is_found_works_and_nothing_of_it_can_go(data: st.DataObject, hosts: tuple[tuple[int, ...], ...]) -> None:
    inside = INSIDE_HOSTS if max(map(len, hosts)) > 1 else ()
    across = BETWEEN_HOSTS if len(hosts) > 1 else ()
    own = data.draw(st.sampled_from([(), (NO_ALGO,), (NO_ALGO, NO_P2P)]))
    known = facts(hosts=hosts, inside_hosts=inside, between_hosts=across, user_variables=own)
    everything = [*own, *inside, *across]
    needed = [frozenset(data.draw(st.sets(st.sampled_from(names(everything)), min_size=1)))] if everything else []
    # Overrides of one host's inside are of no use to others, and never do harm here: monotone.
    end, tried = played(known, broken_unless(known, *needed))
    assert end.kind is (search.EndKind.FOUND if needed else search.EndKind.NOTHING)
    if needed:
        assert frozenset(names(end.overrides)) == needed[0]
    assert len(tried) <= 2 * len(everything) + 2 * search.CONFIRMED + 8


@settings(deadline=None)
@given(st.data())
def test_whatever_the_answers_it_ends_and_recommends_only_what_it_saw_work(data: st.DataObject) -> None:
    hosts = data.draw(st.sampled_from([ONE_HOST, TWO_HOSTS]))
    known = facts(hosts=hosts, between_hosts=BETWEEN_HOSTS, user_variables=(NO_P2P,))

    def answer(step: search.Step, _before: int) -> search.Result:
        works = data.draw(st.booleans())
        failed = () if works else groups_of(known, step)[:1]
        return search.Result(step, "" if works else "hung", None, failed)

    end, tried = played(known, answer)
    if end.kind is search.EndKind.FOUND:
        runs = [one for one in tried if one.step == search.Step(search.Grouping.ALL_RANKS, end.overrides)]
        assert len([run for run in runs if run.works]) >= search.CONFIRMED
