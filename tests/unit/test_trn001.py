"""TRN001: what is said of a training, from hand-made numbers."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from seen import seen_of

from ddpdiag.checks.training.mnist import CHECK, Data
from ddpdiag.model import Depth, Finding, RunOptions, Severity, Status
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


def test_good_training_and_none_are_silent():
    assert findings({rank: trained() for rank in range(4)}) == []
    assert findings({}, statuses={0: Status.HUNG, 1: Status.DIED}) == []


def test_the_plan_is_one_training_over_the_backend_of_the_job():
    seen = seen_of(CHECK, {0: trained()}, options=RunOptions(backend="gloo"), gpus=1)
    assert CHECK.plan(seen) == ()
    empty = structs.replace(seen.recording, trials=())
    (trial,) = CHECK.plan(type(seen)(seen.world, CHECK, empty))
    assert trial.params == {"backend": "gloo"}
    assert trial.groups == ((0,),)
    assert not trial.fresh, "it shares the group of COL001"


@pytest.mark.parametrize(("sums", "ranks", "hosts"), [("aaba", (2,), ("n1",)), ("ab", (), ())])
def test_the_minority_is_blamed_for_other_parameters(golden, sums, ranks, hosts):
    (found,) = findings({rank: trained(checksum=own * 64) for rank, own in enumerate(sums)})
    assert (found.code, found.severity) == ("TRN001.diverged", Severity.ERROR)
    assert (found.ranks, found.hosts) == (ranks, hosts)
    assert found.evidence["checksum bbbbbbbbbbbb"] == [sums.index("b")]
    golden(found)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_nobody_of_the_majority_is_ever_blamed(sums: list[str]):
    rows = {rank: trained(checksum=value * 64) for rank, value in enumerate(sums)}
    for found in findings(rows):
        own = {sums[rank] for rank in range(len(sums)) if rank not in found.ranks}
        assert len(own) == 1 or not found.ranks
        assert 2 * len(found.ranks) < len(sums)


LATER = trained(last_loss=math.nan, first_bad_step=8)


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        pytest.param([LATER, LATER, LATER, trained(last_loss=math.nan, first_bad_step=7)], (3,), id="on one first"),
        pytest.param([trained(last_loss=math.nan, first_bad_step=0)] * 4, (), id="at once"),
        pytest.param([trained(test_loss=math.inf)] * 4, (), id="in no rank's own step"),
        pytest.param([trained(first_bad_step=3)], (0,), id="on a single rank"),
        pytest.param(
            [trained(checksum=str(rank) * 64, first_bad_step=1 + (rank > 0)) for rank in range(3)],
            (0,),
            id="explains different parameters",
        ),
    ],
)
def test_the_rank_where_nan_began_is_blamed(golden, rows, ranks):
    (found,) = findings(dict(enumerate(rows)))
    assert (found.code, found.ranks) == ("TRN001.nan", ranks)
    golden(found)


@pytest.mark.parametrize(
    ("changes", "options", "is_inaccurate"),
    [
        ({"last_loss": 2.30}, {}, True),
        ({"last_loss": 2.30}, {"settings": {"TRN001.loss_share": "1.0"}}, False),
        ({"accuracy": 0.9}, {}, False),
        ({"accuracy": 0.899}, {}, True),
        ({"accuracy": 0.899}, {"settings": {"TRN001.accuracy": "0.75"}}, False),
        ({"accuracy": 0.94}, {"depth": Depth.STANDARD}, True),
        ({"accuracy": 0.1, "last_loss": 2.30}, {}, True),
    ],
)
def test_least_loss_and_accuracy(golden, changes: dict[str, Any], options: dict[str, Any], is_inaccurate: bool):
    found = findings({0: trained(**changes)}, options=RunOptions(**options))
    assert [finding.code for finding in found] == ["TRN001.inaccurate"] * is_inaccurate
    golden(*found)


def test_above_128_ranks_that_trained_accuracy_is_only_shown():
    rows = {rank: trained(accuracy=0.5) for rank in range(129)}
    assert findings(rows) == []
    assert CHECK.report(seen_of(CHECK, rows)).figures["training.accuracy"] == 0.5
    (found,) = findings({rank: rows[rank] for rank in range(128)})
    assert found.code == "TRN001.inaccurate"
    assert findings({rank: rows[rank] for rank in range(100)}, size=200) == []


def test_figures_take_the_slowest_rank_and_columns_show_each():
    report = CHECK.report(seen_of(CHECK, {0: trained(), 1: trained(training_seconds=2.0, samples=1)}))
    assert report.figures["training.samples_per_second"] == 1000.5
    assert [report.columns[rank]["samples_per_second"] for rank in (0, 1)] == [4000.0, 0.5]
    assert CHECK.report(seen_of(CHECK, {})).figures == {}
