"""Which hosts have their ranks tried one by one."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from searches import USUAL, Rate, searched
from seen import seen_of, skip_text, with_events

from ddpdiag.checks.fabric import gpus, hosts
from ddpdiag.checks.world import World
from ddpdiag.model import Depth, Event, EventKind, RunOptions
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, simulate


def planned(ranks: int, ranks_per_node: int, **options: object) -> set[int]:
    """The ranks of the first round."""
    own = RunOptions(backend="gloo", **options)  # type: ignore[arg-type]
    seen = seen_of(hosts.CHECK, {}, size=ranks, ranks_per_node=ranks_per_node, options=own)
    empty = seen.of(gpus.CHECK)
    return {rank for trial in gpus.CHECK.plan(empty) for rank in trial.ranks}


@pytest.mark.parametrize(
    ("ranks", "per_node", "options", "expected"),
    [
        (4, 4, {}, ()),
        (4, 4, {"stages": ("fabric",)}, range(4)),
        (4, 4, {"depth": Depth.STANDARD}, range(4)),
        (8, 4, {"depth": Depth.STANDARD}, ()),
        (8, 4, {"depth": Depth.DEEP}, range(8)),
        (8, 4, {"select": ("FAB002",)}, range(8)),
        (2, 2, {"select": ("FAB002",)}, ()),
    ],
)
def test_hosts_are_looked_at_where_that_is_asked_for(ranks: int, per_node: int, options: dict, expected: Sequence[int]):
    assert planned(ranks, per_node, **options) == {*expected}


def test_only_what_is_bad_by_itself_is_looked_at_among_many():
    fleet = Fleet(32, Faults(((Fault.SLOW_INSIDE, 2),)), Noise(0.005, 0.0), seed=1)
    recording = simulate(fleet, ranks_per_host=4)
    tried = {rank // 4 for trial in recording.trials if trial.code == "FAB002" for rank in trial.ranks}
    assert tried == fleet.failing


def test_of_two_ranks_none_can_be_told_from_the_other(golden):
    recording = simulate(Fleet(4), ranks_per_host=2)
    world = World(size=8, launcher="hand", options=recording.header.options, arrivals=recording.arrivals)
    golden(skip_text(gpus.CHECK, world))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"nvlinks": 18, "level": "host"}, {"nvlinks": 18, "level": "system"}, True),
        ({"nvlinks": 12, "level": "host"}, {"nvlinks": 4, "level": "host"}, False),
        ({"nvlinks": 4, "level": "host"}, {"nvlinks": 0, "level": "host"}, False),
        ({"nvlinks": 0, "level": "host"}, {"nvlinks": 0, "level": "system"}, False),
        ({"nvlinks": 0, "level": "host"}, {"nvlinks": 0, "level": "host"}, True),
    ],
)
def test_gpus_behind_nvlinks_are_alike_wherever_their_pcie_ways_meet(one: dict, other: dict, alike: bool):
    def joined(nvlinks: int, level: str) -> tuple[object, ...]:
        pair = SimpleNamespace(known_paths=[SimpleNamespace(nvlinks=nvlinks)] * 2, has_nvlinks=nvlinks > 0, level=level)
        return gpus._connection(pair)  # type: ignore[arg-type]

    assert (joined(**one) == joined(**other)) is alike


PATH = ("rank 0 -> rank 1", "rank 1 -> rank 0")


@pytest.mark.parametrize(
    ("count", "rate", "word", "ranks", "links"),
    [
        pytest.param(6, lambda group: USUAL / 4 if {*group} == {0, 1} else USUAL, "path", (), PATH, id="two together"),
        pytest.param(3, lambda group: None if 2 in group else USUAL, "rank", (2,), (), id="one with every partner"),
        pytest.param(4, lambda group: USUAL, "clear", (), (), id="none"),
    ],
)
def test_a_rank_that_is_bad_with_every_partner_is_named(golden, count, rate, word, ranks, links):
    seen = searched(gpus.CHECK, rate, ranks=count, ranks_per_node=count, stages=("fabric",))
    (finding,) = gpus.CHECK.judge(seen)
    assert (finding.code, finding.ranks, finding.links) == (f"FAB002.{word}", ranks, links)
    assert word == "rank" or finding.hosts == ()
    golden(finding)


def test_a_search_that_the_budget_ends_is_not_measured(golden):
    rate: Rate = lambda group: USUAL  # noqa: E731
    seen = searched(gpus.CHECK, rate, ranks=4, ranks_per_node=4, most_rounds=1, stages=("fabric",))
    (finding,) = gpus.CHECK.judge(with_events(seen, Event(kind=EventKind.BUDGET, seconds=58.0)))
    assert (finding.code, finding.is_about_run) == ("FAB002.unmeasured", True)
    golden(finding)
