"""The table of strategies, as people read it."""

import json

import pytest
from msgspec import structs
from reports import finding_of, fit

from ddpdiag.cli.outputs import features_of
from ddpdiag.codec import indented_json as as_json
from ddpdiag.model import Report
from ddpdiag.model.train import Strategy, StrategyRow, StrategyStatus, TrainReport, TrainRequest
from ddpdiag.render import html
from ddpdiag.render.terminal import render_feature

ROWS = (
    StrategyRow(
        strategy=Strategy.SINGLE,
        status=StrategyStatus.WORKS,
        ranks=(0,),
        devices=1,
        samples_per_second=2043.4,
        speedup=1.0,
        efficiency=1.0,
        peak_bytes=306 << 20,
        state_bytes=2_590_000,
    ),
    StrategyRow(
        strategy=Strategy.TENSOR_PARALLEL,
        status=StrategyStatus.WORKS,
        ranks=(0, 1, 2, 3),
        devices=4,
        samples_per_second=1436.2,
        speedup=0.703,
        efficiency=0.176,
        peak_bytes=344 << 20,
        state_bytes=767_000,
        deviation=1.2e-6,
    ),
    StrategyRow(
        strategy=Strategy.FSDP, status=StrategyStatus.HANGS, ranks=(0, 1, 2, 3), devices=4, reason="it did not post"
    ),
    StrategyRow(strategy=Strategy.DP, status=StrategyStatus.NOT_POSSIBLE, reason="one process needs 2 GPUs"),
    StrategyRow(strategy=Strategy.DDP, status=StrategyStatus.UNFINISHED, reason="the run ended before it"),
    StrategyRow(strategy=Strategy.PIPELINE, status=StrategyStatus.UNFINISHED, reason="the run ended before it"),
)


def report(*rows: StrategyRow) -> Report:
    train = TrainReport(
        request=TrainRequest(),
        batch_size=64,
        device="CPU",
        rows=rows or ROWS,
        tolerance=1e-4,
        sentence="single works.",
        torch_version="2.13.0",
    )
    return structs.replace(fit(), train=train, sentence="single works.", findings=(finding_of(),))


def plain(width: int = 80, *, color: bool = False) -> str:
    own = report()
    return render_feature(own, features_of(own), color=color, width=width, details=False)


def test_a_whole_report(golden):
    golden(plain())


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits_its_width_and_nothing_is_lost(width):
    text = plain(width)
    assert all(word in " ".join(text.split()) for word in ("tensor-parallel", "1,436", "0.70", "344"))
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= max(width, 60)


def test_the_page_shows_every_strategy():
    text = html.render(report(), features_of(report()))
    assert all(row.strategy.value in text for row in ROWS)


def test_the_json_report_has_the_rows():
    row = json.loads(as_json(report()))["train"]["rows"][1]
    assert (row["strategy"], row["status"], row["samples_per_second"]) == ("tensor-parallel", "works", 1436.2)
