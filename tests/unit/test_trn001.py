"""TRN001: what is said of a training, from hand-made numbers."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of

from ddpdiag.checks.training.mnist import CHECK, Data
from ddpdiag.model import Depth, Finding, Options, Severity, Status
from ddpdiag.model.measurements import Training

GOOD = Training(
    first_loss=2.35,
    last_loss=0.15,
    accuracy=0.93,
    test_loss=0.22,
    steps=64,
    samples=2000,
    first_bad_step=None,
    checksum="a" * 64,
    training_seconds=0.5,
)


def trained(**changes: Any) -> Data:
    return Data(training=structs.replace(GOOD, **changes))


def findings(rows: dict[int, Data], **world: Any) -> list[Finding]:
    return list(CHECK.judge(seen_of(CHECK, rows, **world)))


def words(rows: dict[int, Data], **world: Any) -> list[str]:
    return [finding.code.partition(".")[2] for finding in findings(rows, **world)]


def test_good_training_is_silent():
    assert findings({rank: trained() for rank in range(4)}) == []


def test_nothing_measured_is_silent():
    assert findings({}, statuses={0: Status.HUNG, 1: Status.DIED}) == []


def test_the_plan_is_one_training_over_the_backend_of_the_job():
    seen = seen_of(CHECK, {0: trained()}, options=Options(backend="gloo"), gpus=1)
    assert CHECK.plan(seen) == ()
    empty = structs.replace(seen.recording, trials=())
    (trial,) = CHECK.plan(type(seen)(seen.world, CHECK, empty))
    assert trial.params == {"backend": "gloo"}
    assert trial.groups == ((0,),)
    assert not trial.fresh, "it shares the group of COL001"


def test_the_minority_is_blamed_for_other_parameters(golden):
    rows = {rank: trained(checksum="b" * 64 if rank == 2 else "a" * 64) for rank in range(4)}
    (found,) = findings(rows)
    assert found.code == "TRN001.diverged"
    assert found.severity is Severity.ERROR
    assert (found.ranks, found.hosts) == ((2,), ("n1",))
    assert found.evidence["checksum bbbbbbbbbbbb"] == [2]
    golden(found)


def test_without_a_majority_nobody_is_blamed(golden):
    (found,) = findings({0: trained(checksum="a" * 64), 1: trained(checksum="b" * 64)})
    assert (found.ranks, found.hosts) == ((), ())
    golden(found)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_nobody_of_the_majority_is_ever_blamed(sums: list[str]):
    rows = {rank: trained(checksum=value * 64) for rank, value in enumerate(sums)}
    for found in findings(rows):
        own = {sums[rank] for rank in range(len(sums)) if rank not in found.ranks}
        assert len(own) == 1 or not found.ranks
        assert 2 * len(found.ranks) < len(sums)


def test_the_rank_where_nan_began_is_blamed(golden):
    rows = {rank: trained(last_loss=math.nan, first_bad_step=7 if rank == 3 else 8) for rank in range(4)}
    (found,) = findings(rows)
    assert (found.code, found.ranks, found.hosts) == ("TRN001.nan", (3,), ("n1",))
    assert found.evidence["first_bad_step"] == 8
    golden(found)


@pytest.mark.parametrize(
    "changes", [{"last_loss": math.nan, "first_bad_step": 0}, {"test_loss": math.inf}], ids=["at-once", "nobodys-own"]
)
def test_nan_that_no_rank_had_first_blames_nobody(golden, changes: dict[str, Any]):
    (found,) = findings({rank: trained(**changes) for rank in range(4)})
    assert (found.code, found.ranks) == ("TRN001.nan", ())
    golden(found)


def test_nan_on_a_single_rank_names_it():
    (found,) = findings({0: trained(first_bad_step=3)})
    assert found.ranks == (0,)


def test_nan_explains_different_parameters():
    rows = {rank: trained(checksum=str(rank) * 64, first_bad_step=1 + (rank > 0)) for rank in range(3)}
    assert words(rows) == ["nan"]


@pytest.mark.parametrize(
    ("changes", "options", "is_inaccurate"),
    [
        ({"last_loss": 2.30}, {}, True),
        ({"last_loss": 2.30}, {"settings": {"TRN001.loss_share": "1.0"}}, False),
        ({"accuracy": 0.9}, {}, False),
        ({"accuracy": 0.899}, {}, True),
        ({"accuracy": 0.899}, {"settings": {"TRN001.accuracy": "0.75"}}, False),
        ({"accuracy": 0.94}, {"depth": Depth.STANDARD}, True),
    ],
)
def test_least_loss_and_accuracy(changes: dict[str, Any], options: dict[str, Any], is_inaccurate: bool):
    assert words({0: trained(**changes)}, options=Options(**options)) == ["inaccurate"] * is_inaccurate


def test_a_network_that_learns_nothing_shows_all_numbers(golden):
    (found,) = findings({0: trained(accuracy=0.1, last_loss=2.30)})
    golden(found)


def test_above_128_ranks_accuracy_is_only_shown():
    rows = {rank: trained(accuracy=0.5) for rank in range(129)}
    assert words(rows) == []
    assert CHECK.report(seen_of(CHECK, rows)).figures["training.accuracy"] == 0.5
    assert words({rank: rows[rank] for rank in range(128)}) == ["inaccurate"]


def test_the_ranks_that_trained_count_even_if_some_were_not_heard():
    assert words({rank: trained(accuracy=0.5) for rank in range(100)}, size=200) == []


def test_figures_take_the_slowest_rank():
    rows = {0: trained(training_seconds=0.5), 1: trained(training_seconds=2.0)}
    figures = CHECK.report(seen_of(CHECK, rows)).figures
    assert figures["training.samples_per_second"] == 2000.0
    assert CHECK.report(seen_of(CHECK, {})).figures == {}


def test_columns_show_each_rank():
    rows = {0: trained(), 1: trained(samples=1)}
    columns = CHECK.report(seen_of(CHECK, rows)).columns
    assert columns[0]["samples_per_second"] == 4000.0
    assert columns[1]["samples_per_second"] == 2.0


def test_non_finite_numbers_survive_the_recording():
    seen = seen_of(CHECK, {0: trained(last_loss=math.nan)})
    training = seen.by_rank[0].training
    assert training is not None
    assert math.isnan(training.last_loss)
