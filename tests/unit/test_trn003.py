"""Wrong gradients name who handed them over, and slow ranks are told with their class."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of, with_arrivals

from ddpdiag.checks.api import Seen
from ddpdiag.checks.training import ddp_step
from ddpdiag.checks.training.ddp_step import Data
from ddpdiag.checks.training.stragglers import Reason, find_stragglers
from ddpdiag.model import Finding, RunOptions, Severity
from ddpdiag.model.measurements import Proof, Steps, Window


def sketch_of(rank: int) -> tuple[float, ...]:
    chance = random.Random(rank)
    return tuple(chance.uniform(-5, 5) for _ in range(4))


def proofs(ranks: int) -> dict[int, Proof]:
    """What healthy ranks see, with a rounding of 1e-6."""
    found = {}
    for rank in range(ranks):
        others = {(rank + way) % ranks for way in (1, 2)} - {rank}
        found[rank] = Proof(
            first_weights="a" * 64, dtype="float32", gradient_error=7e-6, gradient_norm=10.0,
            input_sketch=sketch_of(rank),
            expected_sketches={other: sketch_of(other) for other in others},
        )  # fmt: skip
    return found


def judged(rows: dict[int, Proof], **options: object) -> list[Finding]:
    data = {rank: Data(proof=proof) for rank, proof in rows.items()}
    seen: Seen[Data] = seen_of(ddp_step.CHECK, data, options=RunOptions(**options))  # type: ignore[arg-type]
    return list(ddp_step.judge(seen))


def off(sketch: tuple[float, ...], by: float = 0.5) -> tuple[float, ...]:
    """One element of the gradient is another: every sum changes by as much, up or down."""
    return tuple(value + by * (-1) ** at for at, value in enumerate(sketch))


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_right_gradients_are_no_finding_and_no_numbers_name_no_rank(ranks):
    rows = proofs(ranks)
    assert judged(rows) == []
    rows = {rank: structs.replace(proof, gradient_norm=float("nan")) for rank, proof in rows.items()}
    assert all(finding.ranks == () for finding in judged(rows))


def test_of_two_ranks_none_is_named(golden):
    rows = proofs(2)
    (found,) = judged(rows | {1: structs.replace(rows[1], input_sketch=off(rows[1].input_sketch))})
    assert (found.code, found.ranks) == ("TRN003.gradient", ())
    golden(found)


@pytest.mark.parametrize("ranks", [3, 4, 9])
@pytest.mark.parametrize(("guilty", "witnesses"), [(0, False), (2, False), (1, True)])
def test_who_hands_over_another_gradient_is_named_once(ranks, guilty, witnesses):
    # All get the mean, with the wrong part in it.
    rows = {rank: structs.replace(proof, gradient_error=0.1) for rank, proof in proofs(ranks).items()}
    own = rows[guilty]
    told = {rank: off(sketch) for rank, sketch in own.expected_sketches.items()} if witnesses else own.expected_sketches
    rows[guilty] = structs.replace(own, input_sketch=off(own.input_sketch), expected_sketches=told)
    (found,) = judged(rows)
    assert (found.code, found.ranks, found.severity) == ("TRN003.gradient", (guilty,), Severity.ERROR)


@pytest.mark.parametrize("error", [0.01, float("nan"), float("inf")])
def test_a_gradient_that_is_not_that_of_one_process_is_told(error):
    rows = proofs(4)
    rows[3] = structs.replace(rows[3], gradient_error=error)
    (found,) = judged(rows)
    assert (found.code, found.ranks) == ("TRN003.unequal", (3,))
    (found,) = judged({rank: structs.replace(proof, gradient_error=error) for rank, proof in rows.items()})
    assert (found.code, found.ranks) == ("TRN003.unequal", ())


def test_other_first_weights_explain_the_rest():
    rows = proofs(4)
    rows[2] = structs.replace(
        rows[2], first_weights="b" * 64, gradient_error=0.5, input_sketch=off(rows[2].input_sketch)
    )
    (found,) = judged(rows)
    assert (found.code, found.ranks) == ("TRN003.weights", (2,))


LIMITS = (1.10, 0.8)


def steps(
    ranks: int, *, seed: int = 0, noise: float = 0.02, slow: dict[int, dict[str, float]] | None = None
) -> dict[int, Steps]:
    """Ten windows of each rank; `slow` gives parts of some ranks in seconds. All leave the all-reduce together."""
    chance = random.Random(seed)
    own: dict[int, list[Window]] = {rank: [] for rank in range(ranks)}
    for _ in range(10):
        parts = {}
        for rank in range(ranks):
            usual = {"data": 5e-4, "forward": 3e-3, "backward": 4e-3, "optimizer": 3e-4, "core_share": 1.0}
            usual |= (slow or {}).get(rank, {})
            parts[rank] = {name: value * (1 + chance.gauss(0, noise)) for name, value in usual.items()}
        come = {rank: sum(p[n] for n in ("data", "forward", "backward")) for rank, p in parts.items()}
        for rank, part in parts.items():
            own[rank].append(Window(**part, wait=1e-3 + max(come.values()) - come[rank]))
    return {
        rank: Steps(
            windows=tuple(own[rank]), bucket_bytes=25 << 20, bucket_seconds=0.03,
            overlap=0.5,
        )
        for rank in range(ranks)
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"data": 3e-3}, Reason.DATA),
        ({"backward": 7e-3}, Reason.COMPUTE),
        ({"backward": 7e-3, "core_share": 0.5}, Reason.CORES),
    ],
)
def test_who_is_slow_is_named_with_its_class(ranks, part, why):
    for seed in range(20):
        (found,) = find_stragglers(steps(ranks, seed=seed, slow={1: part}), *LIMITS)
        assert (found.rank, found.reason) == (1, why)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_with_nobody_slow_nobody_is_named(ranks):
    for seed in range(50):
        assert find_stragglers(steps(ranks, seed=seed, noise=0.05), *LIMITS) == ()


def launch_bound(own: float) -> dict[str, float]:
    """A step on a GPU: what it takes is Python's, and little is left for the rest."""
    return {"data": 3e-4, "forward": own / 2, "backward": own / 2, "optimizer": 2e-4}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("slower", [3.3e-3, 4.0e-3, 4.6e-3])
def test_a_rank_whose_launches_take_longer_is_no_straggler(ranks, slower):
    usual = {rank: launch_bound(3e-3) for rank in range(ranks)}
    for seed in range(20):
        assert find_stragglers(steps(ranks, seed=seed, slow=usual | {1: launch_bound(slower)}), *LIMITS) == ()
    (found,) = find_stragglers(steps(ranks, slow=usual | {1: launch_bound(9e-3)}), *LIMITS)
    assert found.rank == 1


def test_two_of_eight_are_both_named_and_most_of_them_are_not():
    slow = {"backward": 8e-3}
    assert [own.rank for own in find_stragglers(steps(8, slow={2: slow, 5: slow}), *LIMITS)] == [2, 5]
    assert find_stragglers(steps(4, slow={0: slow, 1: slow, 3: slow}), *LIMITS) == ()


@given(st.integers(2, 12), st.data())
def test_any_figures_are_judged_and_no_more_than_half_of_the_ranks_are_named(ranks, data):
    seconds = st.floats(0, 1e3)
    window = st.builds(Window, seconds, seconds, seconds, seconds, seconds, st.floats(0, 64))
    rows = {
        rank: Steps(
            windows=tuple(data.draw(st.lists(window, min_size=2, max_size=4))), bucket_bytes=1, bucket_seconds=1.0,
            overlap=None,
        )
        for rank in range(ranks)
    }  # fmt: skip
    assert 2 * len(find_stragglers(rows, *LIMITS)) <= ranks


def test_the_finding_names_the_class_the_numbers_and_what_to_do(golden):
    rows = {rank: Data(steps=own) for rank, own in steps(4, slow={2: {"data": 4e-3}}).items()}
    seen: Seen[Data] = seen_of(ddp_step.CHECK, rows)
    (found,) = ddp_step.judge(seen)
    assert (found.code, found.ranks, found.severity) == ("TRN003.straggler", (2,), Severity.WARNING)
    assert found.evidence["class"] == "data"
    golden(found)
    # Their sum is the step.
    parts = ddp_step.columns(seen)[2]
    assert set(parts) == {f"{part}_seconds" for part in ("data", "forward", "backward", "optimizer", "wait")}
    assert sum(parts.values()) in [pytest.approx(window.own_seconds + window.wait) for window in rows[2].steps.windows]
    assert ddp_step.figures(seen)["step.overlap_share"] == 0.5


@pytest.mark.parametrize(
    ("cpus", "part", "named"),
    [
        pytest.param("f", {"backward": 7e-3, "core_share": 0.5}, [(2,)], id="a core each"),
        pytest.param("3", {"backward": 7e-3, "core_share": 0.5}, [], id="less of a shared core"),
        pytest.param("3", {"data": 4e-3}, [(2,)], id="two ranks a core"),
        pytest.param("1", {"data": 4e-3}, [], id="four ranks a core"),
    ],
)
def test_where_ranks_share_cores_no_rank_is_slow_for_lack_of_them(cpus, part, named):
    rows = {rank: Data(steps=own) for rank, own in steps(4, slow={2: part}).items()}
    seen: Seen[Data] = seen_of(ddp_step.CHECK, rows, ranks_per_node=4)
    arrivals = {rank: structs.replace(own, cpu_mask=cpus) for rank, own in seen.world.arrivals.items()}
    found = ddp_step.judge(with_arrivals(seen, arrivals))
    assert [own.ranks for own in found if own.code == "TRN003.straggler"] == named


def wrong(rows: dict[int, Proof], bad: set[int]) -> dict[int, Proof]:
    """These ranks compute each gradient wrongly, their own and those of others, each in its own way."""
    for rank in bad:
        spoilt = {other: off(told, 0.5 + rank) for other, told in rows[rank].expected_sketches.items()}
        rows[rank] = structs.replace(
            rows[rank], input_sketch=off(rows[rank].input_sketch, 0.5 + rank), expected_sketches=spoilt
        )
    return rows


def witnessed(ranks: int) -> dict[int, Proof]:
    """Healthy ranks whose witnesses are a third and two thirds of the world away, as in the product."""
    found = {}
    for rank, proof in proofs(ranks).items():
        others = ((rank + way * ranks // 3) % ranks for way in (1, 2))
        found[rank] = structs.replace(proof, expected_sketches={other: sketch_of(other) for other in others})
    return found


@pytest.mark.parametrize(("ranks", "bad"), [(8, {2, 3}), (16, {4, 5, 6, 7}), (6, {0, 1})])
def test_the_neighbour_of_a_bad_host_is_not_blamed(ranks, bad):
    found = next(finding for finding in judged(wrong(witnessed(ranks), bad)) if finding.code == "TRN003.gradient")
    assert set(found.ranks) <= bad


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_witness_that_computes_wrongly_is_outvoted_by_the_rank_and_its_other_witness(golden, ranks):
    rows = witnessed(ranks)
    rows[1] = structs.replace(
        rows[1], expected_sketches={other: off(told) for other, told in rows[1].expected_sketches.items()}
    )
    (found,) = [finding for finding in judged(rows) if finding.code == "TRN003.gradient"]
    assert found.ranks == (1,)
    golden(found)
