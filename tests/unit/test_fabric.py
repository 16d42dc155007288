"""Who of many is bad: the search, played against simulated fleets with fixed seeds."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpdiag.checks.fabric.search import SearchInput, SearchResult, replay, search_all, search_pairs
from ddpdiag.checks.fabric.search_data import (
    Diagnosis,
    Phase,
    RateLimits,
    Result,
    Results,
    Round,
    Rules,
    bar_of,
    bar_of_best,
    pair_up,
    round_robin,
    smallest_slowdown,
    z_of,
)

USUAL = 100e9
relaxed = settings(deadline=None)
Test = Callable[[Round], Results]


class Fleet:
    """Units of which some are slow: a pair is as slow as its slower end, with noise, and now and then for no reason."""

    def __init__(self, count, bad=(), by=0.25, sigma=0.02, transients=0.01, level=1.0, paths=(), seed=0, dead=()):
        self.units = tuple(range(count))
        self.bad, self.paths, self.dead = frozenset(bad), {frozenset(path) for path in paths}, frozenset(dead)
        self.by, self.sigma, self.transients, self.level = by, sigma, transients, level
        self.random = random.Random(seed)
        self.rounds: list[Round] = []

    def __call__(self, step: Round) -> Results:
        self.rounds.append(step)
        return {group: self.tested(group) for group in step.groups}

    def tested(self, group) -> Result:
        if self.dead.intersection(group):
            return Result(None, "hung")
        slow = self.bad.intersection(group) or any(path <= {*group} for path in self.paths)
        rate = self.level * USUAL * (1 - self.by if slow else 1) * (1 + self.sigma * self.random.gauss(0, 1))
        return Result(rate / 2 if self.random.random() < self.transients else rate)


def searched(fleet: Fleet, rules: Rules | None = None, domains=None, seed=1) -> Diagnosis:
    # Another chance than the fleet's own: shuffled alike, its bad ones would never meet each other.
    search = search_pairs(fleet.units, domains, rules, seed + 1_000_000)
    step = next(search)
    while True:
        try:
            step = search.send(fleet(step))
        except StopIteration as end:
            return end.value


def named(found: Diagnosis) -> set[int]:
    return {bad.unit for bad in found.bad}


@pytest.mark.parametrize("seed", range(3))
def test_of_thousands_the_slow_ones_are_named_in_ten_rounds(seed):
    slow = frozenset(random.Random(seed).sample(range(16_384), 164))
    found = searched(Fleet(16_384, slow, seed=seed), seed=seed)
    assert named(found) == slow
    assert found.rounds == 10
    assert not found.undecided
    assert len(found.cleared) == 16_384 - 164


def test_the_false_blame_of_many_runs_is_rare_and_nobody_is_missed():
    false = missed = 0
    for seed in range(40):
        slow = frozenset(random.Random(seed).sample(range(1024), 10))
        found = named(searched(Fleet(1024, slow, seed=seed), seed=seed))
        false, missed = false + len(found - slow), missed + len(slow - found)
    assert (false, missed) == (0, 0)


@pytest.mark.parametrize("count", [3, 4, 5, 8, 9, 16, 17, 65, 129, 300])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25])
def test_worlds_of_all_sizes_with_up_to_a_quarter_bad(count, share):
    bad = frozenset(random.Random(count).sample(range(count), int(count * share)))
    false = missed = 0
    for seed in range(20):
        found = searched(Fleet(count, bad, by=0.4, seed=seed), seed=seed)
        assert not found.systemic
        false, missed = false + len(named(found) - bad), missed + len(bad - named(found))
    assert false <= 1
    assert missed <= 1


def test_dead_units_are_named_as_well():
    found = searched(Fleet(64, dead=(5, 40)))
    assert named(found) == {5, 40}
    assert all(tested.rate is None for bad in found.bad for tested in bad.tests)


def test_a_way_between_two_blames_neither():
    for seed in range(20):
        found = searched(Fleet(8, paths=[(2, 5)], by=0.5, transients=0, seed=seed), seed=seed)
        assert not found.bad
        assert [path.pair for path in found.paths] == [(2, 5)]
        assert len(found.paths[0].tests) == 3


def test_a_slow_path_beside_a_slow_uplink_is_named_as_well():
    leaves = {unit: unit // 2 for unit in range(8)}
    slow = [(0, 6), (2, 7), (4, 6), (0, 2)]  # three cross the uplink of leaf 3; the ends of (0, 2) do so with others
    for seed in (1, 2, 5, 7):  # with others the rounds are over before each slow pair has failed three times
        found = searched(Fleet(8, paths=slow, by=0.5, transients=0, seed=seed), domains=leaves, seed=seed)
        assert [(part.domain, part.units) for part in found.congested] == [(3, (0, 2, 4, 6, 7))]
        assert [path.pair for path in found.paths] == [(0, 2)]
        assert not found.bad


@pytest.mark.parametrize("fault", [{"bad": (1,), "by": 0.99}, {"dead": (1,)}])
@pytest.mark.parametrize("count", [3, 4, 5])
def test_one_of_a_few_is_no_matter_of_all_though_it_spoils_most_pairs(count, fault):
    for seed in range(20):
        found = searched(Fleet(count, transients=0, seed=seed, **fault), Rules(least=30e9), seed=seed)
        assert (found.systemic, named(found), found.undecided) == (None, {1}, ())


@pytest.mark.parametrize(
    ("fleet", "rules"),
    [
        pytest.param(Fleet(2, dead=(0,)), None, id="of two, one is dead"),
        pytest.param(Fleet(4, bad=(0, 1), by=0.99, transients=0), Rules(least=30e9), id="half of a few are slow"),
        pytest.param(Fleet(4, dead=(0, 1), transients=0), Rules(least=30e9), id="half of a few are dead"),
        pytest.param(Fleet(8, bad=range(6), by=0.9), None, id="most are slow"),
        pytest.param(Fleet(64, dead=range(40)), None, id="most pairs do not end"),
        pytest.param(Fleet(64, level=1e-5), Rules(least=30e6), id="all are below the least rate"),
    ],
)
def test_where_it_may_be_a_matter_of_all_nobody_is_blamed_or_cleared(golden, fleet, rules):
    found = searched(fleet, rules)
    assert (bool(found.systemic), found.bad, found.cleared) == (True, (), frozenset())
    golden(found.systemic.reason)


def test_one_unit_alone_has_nobody_to_be_tried_with():
    located = replay(search_all(SearchInput((0,))), ())
    assert isinstance(located, SearchResult)
    assert located.diagnosis.cleared == {0}


@relaxed
@given(st.integers(2, 60), st.integers(0, 5), st.integers(0, 1000))
def test_everybody_is_in_one_pair(count, leaves, seed):
    domains = {unit: unit % leaves for unit in range(count)} if leaves else {}
    pairs = pair_up(range(count), domains, random.Random(seed))
    members = [unit for pair in pairs for unit in pair]
    assert len(members) == len({*members}) == count - count % 2


@relaxed
@given(st.integers(1, 8), st.integers(2, 16), st.integers(0, 1000))
def test_partners_are_of_other_leaves_where_that_is_possible(hosts, leaves, seed):
    domains = {unit: unit // hosts for unit in range(hosts * leaves)}
    mixed = pair_up(range(hosts * leaves), domains, random.Random(seed))
    same = sum(domains[one] == domains[other] for one, other in mixed)
    assert same == 0 or (leaves % 2 and same <= hosts)


@relaxed
@given(st.integers(2, 30))
def test_a_round_robin_meets_everybody_once(count):
    rounds = [round_robin(range(count), number) for number in range(count - 1 + count % 2)]
    met = Counter(pair for pairs in rounds for pair in pairs)
    assert set(met.values()) <= {1}
    assert len(met) == count * (count - 1) // 2
    for pairs in rounds:
        members = [unit for pair in pairs for unit in pair]
        assert len(members) == len({*members})


def test_the_bar_lies_by_the_noise_of_the_fleet_and_never_above_the_floor():
    quiet = bar_of([USUAL] * 100, 200, Rules())
    assert quiet == RateLimits(USUAL, 0.0, pytest.approx(0.95 * USUAL))
    chance = random.Random(1)
    noisy = bar_of([USUAL * (1 + 0.1 * chance.gauss(0, 1)) for _ in range(2000)], 4000, Rules())
    assert noisy.sigma == pytest.approx(0.1, rel=0.25)
    assert noisy.least < 0.9 * USUAL


def test_nearly_half_of_the_pairs_may_be_slow():
    chance = random.Random(2)
    rates = [USUAL * (0.75 if number % 100 < 44 else 1) * (1 + 0.02 * chance.gauss(0, 1)) for number in range(4000)]
    bar = bar_of(rates, 8000, Rules())
    assert bar.usual == pytest.approx(USUAL, rel=0.03)
    assert 0.78 * USUAL < bar.least < 0.95 * USUAL


def test_more_units_need_a_higher_bar_or_more_rounds():
    assert Rules().failures_for(100) == 3
    assert Rules().failures_for(2000) == 4
    assert z_of(16_384, Rules(failures=3)) == pytest.approx(2.61, abs=0.05)  # as simulated before
    assert z_of(16_384, Rules(failures=4)) == pytest.approx(1.86, abs=0.05)


@relaxed
@given(st.floats(0, 0.2), st.integers(2, 20_000))
def test_the_smallest_slowdown_is_one_that_fails_every_time(sigma, units):
    bar = RateLimits(USUAL, sigma, USUAL * (1 - max(0.05, z_of(units, Rules()) * sigma)))
    found_from = smallest_slowdown(bar, 4)
    assert bar.share - 1e-9 <= found_from <= 1


@relaxed
@given(st.lists(st.floats(0, 1e12), max_size=20), st.integers(1, 100))
@example([0.0, 0.0, 1e9], 2)
@example([5e-324, 5e-324, 1e9], 2)
def test_any_rates_have_a_bar(rates, units):
    for bar in (bar_of(rates, units, Rules()), bar_of_best(rates, 3, Rules())):
        assert bar.least <= bar.usual or bar.usual == 0


def test_a_unit_that_is_bad_alone_takes_no_part_in_pairs():
    class Inside(Fleet):
        def tested(self, group):
            return Result(USUAL / 4) if group == (3,) else super().tested(group)

    fleet = Inside(10, transients=0)
    answers: list[Results] = []
    while not isinstance(found := replay(search_all(SearchInput(fleet.units, fleet.units)), answers), SearchResult):
        answers.append(fleet(found))
    assert [own.unit for own in found.alone] == [3]
    assert len(found.alone[0].tests) == 3
    pairs = [group for step in fleet.rounds if step.phase is not Phase.LOCAL for group in step.groups]
    assert not any(3 in group for group in pairs)
    assert found.proof is not None
    assert fleet.rounds[-1] == Round(Phase.VERIFY, (tuple(unit for unit in range(10) if unit != 3),))


def test_a_unit_that_is_lost_is_not_tried_again_and_the_others_are_judged():
    fleet, lost = Fleet(12, bad=(3,), by=0.5, transients=0), 7
    answers: list[Results] = []
    ground = SearchInput(fleet.units)

    def possible(step: Round) -> list[tuple[int, ...]]:
        # It is lost after the first round.
        return [group for group in step.groups if not answers or lost not in group]

    while not isinstance(step := replay(search_all(ground), answers, possible), SearchResult):
        answers.append(fleet(step._replace(groups=tuple(possible(step)))))
    assert {bad.unit for bad in step.diagnosis.bad} == {3, lost} - ({lost} if lost in step.diagnosis.cleared else set())
    assert step.diagnosis.cleared >= {*fleet.units} - {3, lost}


@relaxed
@given(st.integers(1, 12), st.data())
def test_whatever_is_answered_it_ends_and_blames_only_who_failed(count, data):
    fleet_rates = st.none() | st.floats(0, 1e12)
    answers: list[Results] = []
    ground = SearchInput(tuple(range(count)), tuple(range(0, count, 2)))
    for _ in range(80):
        step = replay(search_all(ground), answers)
        if isinstance(step, SearchResult):
            break
        answers.append({group: Result(data.draw(fleet_rates), "hung") for group in step.groups})
    else:
        raise AssertionError("it goes on for ever")
    for bad in step.diagnosis.bad:
        assert bad.unit not in step.diagnosis.cleared
        assert len(bad.tests) >= 3
