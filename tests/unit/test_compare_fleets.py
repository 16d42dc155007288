"""Of a fleet the repeats of each rank go, and the answers of a comparison stay."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of

from ddpdiag.checks.snapshots import snapshot_of
from ddpdiag.checks.training import ddp_step
from ddpdiag.codec import decode, encode
from ddpdiag.comparison.figures import Change, Direction, compared_figures
from ddpdiag.comparison.noise import fields, kept, ranks_of
from ddpdiag.model.measurements import Steps, Window
from ddpdiag.model.options import KEPT_RANKS, Figure, Sampling, Snapshot, Standings

relaxed = settings(deadline=None, max_examples=30)


def steps_of(rank: int, slower: float) -> Steps:
    random = Random(rank)
    windows = tuple(
        Window(0.002, 0.011 * slower * random.uniform(0.99, 1.01), 0.025 * slower, 0.01, 0.001, 0.98) for _ in range(10)
    )
    return Steps(windows=windows, bucket_bytes=1, bucket_seconds=1.0, edge_bytes=1, edges={}, overlap=None)


def run(size: int, **slower: float) -> Snapshot:
    """A run of `size` ranks with GPUs; a keyword such as `rank7=1.2` makes one slower."""
    rows = {rank: ddp_step.Data(steps=steps_of(rank, slower.get(f"rank{rank}", 1.0))) for rank in range(size)}
    seen = seen_of(ddp_step.CHECK, rows, ranks_per_node=8, gpus=8)
    return snapshot_of(seen.world, seen.recording)


def without_repeats(snapshot: Snapshot) -> Snapshot:
    """As if it had been the snapshot of a fleet."""
    own = {figure.rank: figure for figure in snapshot.figures if figure.within and figure.rank is not None}
    others = tuple(figure for figure in snapshot.figures if not figure.within)
    return structs.replace(snapshot, figures=others, standings=tuple(kept(own)))


def told(old: Snapshot, new: Snapshot) -> tuple[int, list[Change]]:
    count, changes = compared_figures(old, new)
    return count, [change for change in changes if change.direction is not Direction.NEUTRAL]


def test_up_to_a_thousand_ranks_every_repeat_is_kept_and_beyond_a_few_bytes_a_rank() -> None:
    few, many = run(KEPT_RANKS), run(KEPT_RANKS + 1)
    assert (len(few.figures), few.standings) == (KEPT_RANKS + 1, ())
    assert [figure.name for figure in many.figures] == ["step.usual_seconds"]
    assert many.standings[0].ranks == ((0, KEPT_RANKS),)
    assert len(encode(many)) < 20 * KEPT_RANKS < len(encode(few)) / 10


def test_in_a_fleet_the_rank_that_became_slower_is_named(golden) -> None:
    size = KEPT_RANKS + 8
    old, new = run(size, rank9=1.3), run(size, rank700=1.2)
    count, changes = told(old, decode(encode(new), Snapshot))
    assert count == size + 1
    assert [(change.direction.value, change.ranks) for change in changes] == [
        ("improvement", (9,)), ("regression", (700,)),
    ]  # fmt: skip
    golden(*(change.text for change in changes))
    assert told(new, new) == (size + 1, [])


@relaxed
@given(
    st.integers(3, 12),
    st.dictionaries(st.integers(0, 11), st.sampled_from((0.8, 1.05, 1.15, 1.3, 2.0)), max_size=3),
    st.dictionaries(st.integers(0, 11), st.sampled_from((0.8, 1.05, 1.15, 1.3, 2.0)), max_size=3),
)
def test_without_repeats_the_answers_are_the_same(size: int, then: dict[int, float], now: dict[int, float]) -> None:
    old, new = (run(size, **{f"rank{rank}": own for rank, own in slower.items()}) for slower in (then, now))
    count, changes = told(old, new)
    for first, second in (
        (without_repeats(old), without_repeats(new)),
        (old, without_repeats(new)),
        (without_repeats(old), new),
    ):
        other_count, others = told(first, second)
        assert other_count == count
        assert [(own.direction, own.ranks) for own in others] == [(own.direction, own.ranks) for own in changes]
        for own, other in zip(changes, others, strict=True):
            assert (other.old, other.new) == pytest.approx((own.old, own.new), abs=1e-4)


def test_numbers_that_mean_nothing_are_left_out() -> None:
    own = Standings(name="x", title="x", ranks=((0, 10**12),), ratios=(1.0, 0.0, -1.0), errors=(0.1, 0.1, 0.1, 0.1))
    assert list(ranks_of(own)) == [0, 1, 2]
    empty = Snapshot(created="", shape={}, facts={}, figures=(), standings=(own,))
    assert list(fields(empty)["x"].standings) == [0]


def test_of_ranks_without_repeats_nothing_is_kept() -> None:
    single = {
        rank: Figure(name="x", title="x", rank=rank, within=True, values=(1.0,), sampling=Sampling.REPEATS)
        for rank in range(9)
    }
    assert list(kept(single)) == []
