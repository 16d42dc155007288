"""A training by strategies in the formats of the report: terminal, HTML, Markdown, Prometheus."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpdiag.model import Report
from ddpdiag.model.train import Curve, Ended, ScalingRow, StrategyRow, TrainReport
from ddpdiag.render import Sample
from ddpdiag.render.html import page as html
from ddpdiag.render.html.page import Cell, Section, words
from ddpdiag.render.markup import Piece, listed, name, said, spaced, tabled
from ddpdiag.render.page import Column, Page, draw, fitted, one_line, written
from ddpdiag.render.plots import Bar, Bars, draw_bars
from ddpdiag.render.terminal import write_head, write_notes, write_verdict
from ddpdiag.render.terminal.findings import write_findings
from ddpdiag.text import ABSENT, count, figure, percent

STYLES = {
    Ended.WORKS: "green",
    Ended.WRONG: "bold red",
    Ended.HANGS: "bold red",
    Ended.FAILS: "bold red",
    Ended.UNFINISHED: "bold yellow",
    Ended.NOT_COMPARED: "bold yellow",
    Ended.NOT_POSSIBLE: "dim",
}
# The reason is below the table.
_SHORT = {Ended.UNFINISHED: "unknown", Ended.NOT_COMPARED: "unknown", Ended.NOT_POSSIBLE: "not here"}
_BAD = (Ended.WRONG, Ended.HANGS, Ended.FAILS)
_CURVES = {Curve.STRONG: "the same batch for all ranks together", Curve.WEAK: "the same batch for each rank"}
# A larger one is an accident, and would hide the others.
_MOST_LOSS = 1e6


def shown(value: float | None, form: str, absent: str = "-") -> str:
    """The number in this format."""
    return absent if value is None else form.format(value)


# Terminal ------------------------------------------------------------------------------------------------------------


def render(
    report: Report, *, tty: bool = False, color: bool, width: int, details: bool = False, timings: bool = False
) -> str:
    """`report.train` as text of `width` columns, in a terminal or a log; `details` shortens nothing."""
    page, train = Page(color=color, width=width), report.train
    if train is not None:
        write_head(page, report)
        torch = f"torch {train.torch_version}" if train.torch_version else ""
        parts = ", ".join(filter(None, (one_line(train.device), one_line(torch))))
        page.write(
            f"{f'{parts}. ' if parts else ''}A ConvNet learns MNIST digits: {count(train.asked.steps, 'step')} of "
            f"{count(train.batch_size, 'image')} over all ranks, {one_line(train.asked.dtype)}. x: times as fast as "
            "single; eff.: that for each device; comm: share of time in which a collective is under way, waiting "
            "included; peak, state: memory of a rank; off: largest difference of a loss from single's, at most "
            f"{train.tolerance:.2g}.",
            style="dim",
        )
        page.blank()
        _write_rows(page, train.rows)
        _write_reasons(page, train.rows)
        for curve in Curve:
            _write_curve(page, curve, [row for row in train.scaling if row.curve is curve])
    write_findings(page, report.findings, details=details)
    write_notes(page, report.notes)
    write_verdict(page, report)
    return page.text()


def _write_rows(page: Page, rows: Sequence[StrategyRow]) -> None:
    memory = written("_bytes", [row.peak_bytes for row in rows], "-")
    states = written("_bytes", [row.state_bytes for row in rows], "-")
    figures = {
        "ranks": [str(len(row.ranks)) if row.ranks else "-" for row in rows],
        "samples/s": [shown(row.samples_per_second, "{:,.0f}") for row in rows],
        "x": [shown(row.speedup, "{:.2f}") for row in rows],
        "eff.": [shown(row.efficiency, "{:.0%}") for row in rows],
        "comm": [shown(row.communication_share, "{:.0%}") for row in rows],
        f"peak\n{memory[0]}": memory[1],
        f"state\n{states[0]}": states[1],
        "off": [shown(row.deviation, "{:.1g}") for row in rows],
    }
    names = Column("strategy", tuple(row.strategy.value for row in rows), right=False)
    write_table(page, names, [row.ended for row in rows], figures.items())


def write_table(
    page: Page, names: Column, ended: Sequence[Ended], figures: Iterable[tuple[str, Sequence[str]]]
) -> None:
    """The outcome of each row beside its figures, in as many tables as the width asks for."""
    came_to = tuple(_SHORT.get(each, each.value) for each in ended)
    fixed = (names, Column("", came_to, right=False, styles=tuple(STYLES[each] for each in ended)))
    columns = [Column(header, tuple(cells), right=True) for header, cells in figures]
    for table in fitted(fixed, columns, len(ended), width=page.width, gap=1):
        page.table(table)
        page.blank()


def _write_reasons(page: Page, rows: Sequence[StrategyRow]) -> None:
    """Why, of those that do not work."""
    alike: dict[tuple[Ended, str], list[str]] = {}
    for row in rows:
        if row.ended is not Ended.WORKS:
            alike.setdefault((row.ended, row.reason), []).append(row.strategy.value)
    for (ended, reason), names in alike.items():
        page.write(one_line(reason), lead=f"{', '.join(names)} {ended.value}: ", lead_style=STYLES[ended])
    learnt = next((row for row in rows if row.first_loss is not None and row.last_loss is not None), None)
    if learnt is not None:
        page.write(
            f"loss of {learnt.strategy.value}: {figure(learnt.first_loss or 0.0)} at the start, "
            f"{figure(learnt.last_loss or 0.0)} at the end",
            style="dim",
        )
    page.blank()


def _write_curve(page: Page, curve: Curve, rows: Sequence[ScalingRow]) -> None:
    if not rows:
        return
    page.write(f"ddp, {_CURVES[curve]} ({curve.value} scaling):", style="bold")
    columns = (
        Column("ranks", tuple(str(row.ranks) for row in rows), right=True),
        Column("batch", tuple(f"{row.batch_size:,}" for row in rows), right=True),
        Column("samples/s", tuple(shown(row.samples_per_second, "{:,.0f}") for row in rows), right=True),
        Column("eff.", tuple(shown(row.efficiency, "{:.0%}") for row in rows), right=True),
        Column("", tuple(_bar(row) for row in rows), right=False),
    )
    page.table(draw(columns, len(rows), 2))
    page.blank()


def _bar(row: ScalingRow) -> str:
    """A bar of twenty for an efficiency of one, or why there is none."""
    if row.ended is not Ended.WORKS or row.efficiency is None:
        return _SHORT.get(row.ended, row.ended.value)
    return "#" * min(30, round(20 * row.efficiency))


# HTML ----------------------------------------------------------------------------------------------------------------


def section(report: Report) -> Section:
    """For the HTML page: the strategies side by side."""
    train = report.train
    if train is None:
        return Section(name="strategies", title="Strategies")
    drawn = (_speed(train), _communication(train), _loss(train), *(_curve(train, curve) for curve in Curve))
    unit, memory = written("_bytes", [row.peak_bytes for row in train.rows], ABSENT)
    heads = ("strategy", "outcome", "samples/s", "speed-up", "efficiency", f"memory {unit}", "communication", "loss")
    return Section(
        name="strategies",
        title="Strategies",
        figures=tuple(figure for figure in drawn if figure is not None),
        tables=(
            html.Table(
                name="strategy-table",
                caption=f"{train.asked.steps} steps of {train.batch_size} images on {words(train.device)}",
                columns=tuple(html.Column(head, right=number > 1) for number, head in enumerate(heads)),
                rows=tuple(_strategy(row, peak) for row, peak in zip(train.rows, memory, strict=True)),
                note="Speed-up: times as fast as single; efficiency: that for each device; memory: the peak of a rank; "
                f"loss: after the last step, within {train.tolerance:.2g} of single's if it trains correctly.",
            ),
            *([_scaling(train)] if train.scaling else ()),
        ),
    )


def _speed(train: TrainReport) -> html.Figure | None:
    """Samples a second beside those of one process alone."""
    # What did not work is an empty row with its outcome; what could not be tried is in the table.
    drawn = [row for row in train.rows if row.samples_per_second is not None or row.ended in _BAD]
    rows = {row: row.samples_per_second or 0.0 for row in drawn}
    alone = next((rate for row, rate in rows.items() if rate and row.strategy.value == "single"), None)
    told = []
    for row in rows:
        times = f" ({row.ended.value})" if row.ended in _BAD else ""
        if row.speedup is not None and row.strategy.value != "single":
            times = f" ({row.speedup:.2f} x)"
        told.append(f"{row.strategy.value} {_rate(row)}{times}")
    return _bars("Speed", "speed", rows, f", in samples/s: {', '.join(told)}.", "samples/s", alone, "single")


def _communication(train: TrainReport) -> html.Figure | None:
    """The share of a step in which something was under way between ranks."""
    rows = {row: share * 100 for row in train.rows if (share := row.communication_share) is not None}
    told = ", ".join(f"{row.strategy.value} {share:.0f} %" for row, share in rows.items())
    title, unit = "Communication in a step, waiting included", "% of the time"
    return _bars(title, "communication", rows, f", in {unit}: {told}.", unit)


def _loss(train: TrainReport) -> html.Figure | None:
    """The last loss beside the first: all should have learned the same."""
    rows = {row: loss for row in train.rows if (loss := row.last_loss) is not None and 0 <= loss < _MOST_LOSS}
    first = max((loss for row in rows if (loss := row.first_loss) is not None), default=None)
    told = ", ".join(f"{row.strategy.value} {figure(loss)}" for row, loss in rows.items())
    beside = "" if first is None else f"; at the start: {figure(first)}"
    return _bars("Loss at the end", "loss", rows, f": {told}{beside}.", "loss", first, "at the start")


def _bars(
    title: str,
    file: str,
    rows: Mapping[StrategyRow, float],
    told: str,
    unit: str,
    line: float | None = None,
    line_name: str = "",
) -> html.Figure | None:
    """A bar for each strategy; one that did not work shows how it ended."""
    if not rows or max(rows.values()) <= 0:
        return None
    bars = [
        Bar(row.strategy.value, value, row.ended.value if row.ended in _BAD else "", row.ended in _BAD)
        for row, value in rows.items()
    ]
    svg = draw_bars(Bars(unit, bars, line, line_name=line_name), f"train-{file}")
    return html.Figure(title=title, svg=svg, alt=words(f"{title}{told}"))


def _curve(train: TrainReport, curve: Curve) -> html.Figure | None:
    """Samples a second over the number of ranks; the line is that of one."""
    rows = [(row, rate) for row in train.scaling if row.curve is curve and (rate := row.samples_per_second) is not None]
    if len(rows) < 2:
        return None
    bars = [Bar(count(row.ranks, "rank"), rate) for row, rate in rows]
    told = ", ".join(
        f"{bar.label} {rate:,.0f} samples/s{f' ({_share(row.efficiency)})' if row.efficiency is not None else ''}"
        for bar, (row, rate) in zip(bars, rows, strict=True)
    )
    title = f"DDP on more ranks, {_CURVES[curve]}"
    return html.Figure(
        title=title,
        svg=draw_bars(Bars("samples/s", bars, rows[0][1], line_name=bars[0].label), f"scaling-{curve.value}"),
        alt=words(f"{title} ({curve.value} scaling): {told}."),
    )


def _rate(row: StrategyRow | ScalingRow) -> str:
    return shown(row.samples_per_second, "{:,.0f}", ABSENT)


def _share(share: float | None) -> str:
    """Two digits, as the terminal has them."""
    return ABSENT if share is None else f"{share * 100:.0f} %"


def _strategy(row: StrategyRow, peak: str) -> tuple[Cell, ...]:
    why = f": {row.reason}" if row.reason else ""
    return (
        Cell(row.strategy.value),
        Cell(words(f"{row.ended.value}{why}"), mark="bad" if row.ended in _BAD else ""),
        Cell(_rate(row)),
        Cell(shown(row.speedup, "{:.2f}", ABSENT)),
        Cell(_share(row.efficiency)),
        Cell(peak),
        Cell(_share(row.communication_share)),
        Cell(ABSENT if row.last_loss is None else figure(row.last_loss)),
    )


def _scaling(train: TrainReport) -> html.Table:
    heads = ("curve", "ranks", "samples/s", "efficiency")
    cells = ((row.curve.value, str(row.ranks), _rate(row), _share(row.efficiency)) for row in train.scaling)
    return html.Table(
        name="scaling",
        caption="DDP on 1, 2, 4, ... ranks",
        columns=tuple(html.Column(head, right=number > 0) for number, head in enumerate(heads)),
        rows=tuple(tuple(map(Cell, row)) for row in cells),
        note="; ".join(f"{curve.value}: {meaning}" for curve, meaning in _CURVES.items()) + ".",
    )


# Markdown ------------------------------------------------------------------------------------------------------------


# Rows of a table, or lines of a list, and bytes of these and of one sentence.
_ROWS, _TABLE, _LIST, _SENTENCE = 64, 6_000, 4_000, 600


def pieces(report: Report) -> Iterator[Piece]:
    """For Markdown: the table of strategies, and why some do not work."""
    every = report.train.rows if report.train is not None else ()
    unit, memory = written("_bytes", [row.peak_bytes for row in every], "-")
    headers = ("strategy", "", "ranks", "samples/s", "speed-up", "efficiency", "communication", f"peak {unit}")
    rows = [
        (
            name(row.strategy.value, cell=True),
            row.ended.value,
            str(len(row.ranks)) if row.ranks else "-",
            shown(row.samples_per_second, "{:,.0f}"),
            shown(row.speedup, "{:.2f}"),
            "-" if row.efficiency is None else percent(row.efficiency),
            "-" if row.communication_share is None else percent(row.communication_share),
            peak,
        )
        for row, peak in zip(every[:_ROWS], memory, strict=False)
    ]
    yield Piece("strategies", spaced(tabled(headers, rows, "row", total=len(every), most=_TABLE, right=3)))
    reasons = [
        f"- {name(row.strategy.value)} {row.ended.value}: {said(row.reason, _SENTENCE)}" for row in every if row.reason
    ]
    listing = listed(reasons[:_ROWS], "reason", total=len(reasons), most=_LIST)
    yield Piece("why strategies do not work", spaced(listing))


# Prometheus ----------------------------------------------------------------------------------------------------------


def samples(report: Report) -> Iterator[Sample]:
    """For Prometheus: the outcome of each strategy, and the points of the curves."""
    train = report.train
    if train is None:
        return
    for row in train.rows:
        labels = {"strategy": row.strategy.value}
        ended = "1, with the outcome of a strategy as a label."
        yield Sample("train_ended", ended, 1, labels | {"ended": row.ended.value})
        figures = {
            "samples_per_second": (row.samples_per_second, "Images per second, over all ranks."),
            "speedup_ratio": (row.speedup, "Its rate over that of single."),
            "peak_bytes": (row.peak_bytes, "Peak of the memory of the rank that holds most."),
            "state_bytes": (row.state_bytes, "Parameters, gradients and optimizer state of the rank that holds most."),
            "communication_ratio": (row.communication_share, "Share of a step in which it communicated."),
            "loss_deviation": (row.deviation, "Largest difference of the loss from that of single."),
        }
        for figure_name, (value, says) in figures.items():
            if value is not None:
                yield Sample(f"train_{figure_name}", says, value, labels)
    for point in train.scaling:
        if point.samples_per_second is not None:
            labels = {"curve": point.curve.value, "ranks": str(point.ranks), "batch_size": str(point.batch_size)}
            rate = point.samples_per_second
            yield Sample("train_scaling_samples_per_second", "Images per second of ddp on so many ranks.", rate, labels)
