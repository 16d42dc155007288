"""A training by strategies in the formats of the report: terminal, HTML, Markdown, Prometheus."""

from collections.abc import Iterator, Sequence

from ddpdiag.model import Report
from ddpdiag.model.train import Curve, ScalingRow, StrategyRow, TrainReport
from ddpdiag.render import Sample
from ddpdiag.render.html.page import Cell, Column, Figure, Section, Table, words
from ddpdiag.render.markup import Piece, listed, name, said, spaced, tabled
from ddpdiag.render.plots import Bar, Bars, draw_bars
from ddpdiag.strategies.terminal import CURVES, rate_text, render
from ddpdiag.text import ABSENT, byte_count, count, figure, percent

__all__ = ["pieces", "render", "samples", "section"]

_BAD = ("wrong", "hangs", "fails")
# A larger one is an accident, and would hide the others.
_MOST_LOSS = 1e6


def section(report: Report) -> Section:
    """For the HTML page: the strategies side by side."""
    train = report.train
    if train is None:
        return Section(name="strategies", title="Strategies")
    drawn = (_speed(train), _communication(train), _loss(train), *(_curve(train, curve) for curve in Curve))
    return Section(
        name="strategies",
        title="Strategies",
        figures=tuple(figure for figure in drawn if figure is not None),
        tables=(_strategies(train), *_scaling(train)),
    )


def _speed(train: TrainReport) -> Figure | None:
    """Samples a second beside those of one process alone."""
    rows = [(row, row.samples_per_second or 0.0) for row in train.rows if _is_shown(row)]
    alone = next((rate for row, rate in rows if rate and row.strategy.value == "single"), None)
    told = ", ".join(f"{row.strategy.value} {rate_text(row.samples_per_second)}{_times(row)}" for row, _ in rows)
    return _bars("Speed", "speed", "samples/s", rows, told, alone, "single")


def _is_shown(row: StrategyRow) -> bool:
    """What did not work is an empty row that says so; what could not be tried is in the table."""
    return row.samples_per_second is not None or row.ended.value in _BAD


def _times(row: StrategyRow) -> str:
    return f" ({row.speedup:.2f} x)" if row.speedup is not None and row.strategy.value != "single" else _how(row)


def _how(row: StrategyRow) -> str:
    return f" ({row.ended.value})" if row.ended.value in _BAD else ""


def _communication(train: TrainReport) -> Figure | None:
    """The share of a step in which something was under way between ranks."""
    rows = [(row, share * 100) for row in train.rows if (share := row.communication_share) is not None]
    told = ", ".join(f"{row.strategy.value} {share:.0f} %" for row, share in rows)
    return _bars("Communication in a step, waiting included", "communication", "% of the time", rows, told)


def _loss(train: TrainReport) -> Figure | None:
    """The last loss beside the first: all should have learned the same."""
    rows = [(row, loss) for row in train.rows if (loss := row.last_loss) is not None and 0 <= loss < _MOST_LOSS]
    firsts = [loss for row, _ in rows if (loss := row.first_loss) is not None]
    told = ", ".join(f"{row.strategy.value} {figure(loss)}" for row, loss in rows)
    first = max(firsts, default=None)
    return _bars("Loss at the end", "loss", "loss", rows, told, first, "at the start")


def _bars(
    title: str,
    name: str,
    unit: str,
    rows: Sequence[tuple[StrategyRow, float]],
    told: str,
    line: float | None = None,
    meaning: str = "",
) -> Figure | None:
    """A bar for each strategy; one that did not work says how it ended."""
    if not rows or max(value for _, value in rows) <= 0:
        return None
    bars = [
        Bar(row.strategy.value, value, row.ended.value if row.ended.value in _BAD else "", row.ended.value in _BAD)
        for row, value in rows
    ]
    beside = f"; {meaning}: {figure(line)}" if line is not None and name == "loss" else ""
    return Figure(
        title=title,
        svg=draw_bars(Bars(unit, bars, line, line_name=meaning), f"train-{name}"),
        alt=words(f"{title}, in {unit}: {told}{beside}." if unit != "loss" else f"{title}: {told}{beside}."),
    )


def _curve(train: TrainReport, curve: Curve) -> Figure | None:
    """Samples a second over the number of ranks; the line is that of one."""
    rows = [(row, rate) for row in train.scaling if row.curve is curve and (rate := row.samples_per_second) is not None]
    if len(rows) < 2:
        return None
    bars = [Bar(count(row.ranks, "rank"), rate) for row, rate in rows]
    told = ", ".join(f"{count(row.ranks, 'rank')} {rate:,.0f} samples/s{_efficiency(row)}" for row, rate in rows)
    title = f"DDP on more ranks, {CURVES[curve]}"
    return Figure(
        title=title,
        svg=draw_bars(Bars("samples/s", bars, rows[0][1], line_name=bars[0].label), f"scaling-{curve.value}"),
        alt=words(f"{title} ({curve.value} scaling): {told}."),
    )


def _efficiency(row: ScalingRow) -> str:
    return f" ({_share(row.efficiency)})" if row.efficiency is not None else ""


def _share(share: float | None) -> str:
    """Two digits, as the terminal has them."""
    return ABSENT if share is None else f"{share * 100:.0f} %"


def _strategies(train: TrainReport) -> Table:
    heads = ("strategy", "outcome", "samples/s", "speed-up", "efficiency", "memory", "communication", "loss")
    return Table(
        name="strategy-table",
        caption=f"{train.asked.steps} steps of {train.batch_size} images on {words(train.device)}",
        columns=tuple(Column(head, right=number > 1) for number, head in enumerate(heads)),
        rows=tuple(map(_strategy, train.rows)),
        note="Speed-up: times as fast as single; efficiency: that for each device; memory: the peak of a rank; "
        f"loss: after the last step, within {train.tolerance:.2g} of single's where all is well.",
    )


def _strategy(row: StrategyRow) -> tuple[Cell, ...]:
    why = f": {row.reason}" if row.reason else ""
    return (
        Cell(row.strategy.value),
        Cell(words(f"{row.ended.value}{why}"), mark="bad" if row.ended.value in _BAD else ""),
        Cell(rate_text(row.samples_per_second)),
        Cell(ABSENT if row.speedup is None else f"{row.speedup:.2f}"),
        Cell(_share(row.efficiency)),
        Cell(byte_count(row.peak_bytes)),
        Cell(_share(row.communication_share)),
        Cell(ABSENT if row.last_loss is None else figure(row.last_loss)),
    )


def _scaling(train: TrainReport) -> Iterator[Table]:
    if not train.scaling:
        return
    heads = ("curve", "ranks", "samples/s", "efficiency")
    yield Table(
        name="scaling",
        caption="DDP on 1, 2, 4, ... ranks",
        columns=tuple(Column(head, right=number > 0) for number, head in enumerate(heads)),
        rows=tuple(
            (
                Cell(row.curve.value),
                Cell(str(row.ranks)),
                Cell(rate_text(row.samples_per_second)),
                Cell(_share(row.efficiency)),
            )
            for row in train.scaling
        ),
        note="; ".join(f"{curve.value}: {meaning}" for curve, meaning in CURVES.items()) + ".",
    )


# Markdown ------------------------------------------------------------------------------------------------------------


# Rows of a table, or lines of a list, and bytes of these and of one sentence.
_ROWS, _TABLE, _LIST, _SENTENCE = 64, 6_000, 4_000, 600


def pieces(report: Report) -> Iterator[Piece]:
    """For Markdown: the table of strategies, and why some do not work."""
    train = report.train
    if train is None:
        return
    headers = ("strategy", "", "ranks", "samples/s", "speed-up", "efficiency", "communication", "peak")
    rows = [_markdown_row(row) for row in train.rows[:_ROWS]]
    table = tabled(headers, rows, "row", total=len(train.rows), most=_TABLE, right=3)
    yield Piece("strategies", spaced(table))
    reasons = list(_markdown_reasons(train))
    listing = listed(reasons[:_ROWS], "reason", total=len(reasons), most=_LIST)
    yield Piece("why strategies do not work", spaced(listing))


def _markdown_row(row: StrategyRow) -> tuple[str, ...]:
    return (
        name(row.strategy.value, cell=True),
        row.ended.value,
        str(len(row.ranks)) if row.ranks else "-",
        rate_text(row.samples_per_second, "-"),
        "-" if row.speedup is None else f"{row.speedup:.2f}",
        "-" if row.efficiency is None else percent(row.efficiency),
        "-" if row.communication_share is None else percent(row.communication_share),
        "-" if row.peak_bytes is None else byte_count(row.peak_bytes),
    )


def _markdown_reasons(train: TrainReport) -> Iterator[str]:
    for row in train.rows:
        if row.reason:
            yield f"- {name(row.strategy.value)} {row.ended.value}: {said(row.reason, _SENTENCE)}"


# Prometheus ----------------------------------------------------------------------------------------------------------


def samples(report: Report) -> Iterator[Sample]:
    """For Prometheus: what each strategy came to, and the points of the curves."""
    train = report.train
    if train is None:
        return
    for row in train.rows:
        labels = {"strategy": row.strategy.value}
        ended = "1, with what a strategy came to as a label."
        yield Sample("train_ended", ended, 1, labels | {"ended": row.ended.value})
        figures = {
            "samples_per_second": (row.samples_per_second, "Images a second, over all ranks."),
            "speedup_ratio": (row.speedup, "Its rate over that of single."),
            "peak_bytes": (row.peak_bytes, "Peak of the memory of the rank that holds most."),
            "state_bytes": (row.state_bytes, "Parameters, gradients and optimizer state of the rank that holds most."),
            "communication_ratio": (row.communication_share, "Share of a step in which it communicated."),
            "loss_deviation": (row.deviation, "How far the loss was from that of single, at most."),
        }
        for figure_name, (value, says) in figures.items():
            if value is not None:
                yield Sample(f"train_{figure_name}", says, value, labels)
    for point in train.scaling:
        if point.samples_per_second is not None:
            labels = {"curve": point.curve.value, "ranks": str(point.ranks), "batch_size": str(point.batch_size)}
            rate = point.samples_per_second
            yield Sample("train_scaling_samples_per_second", "Images a second of ddp on so many ranks.", rate, labels)
