"""Strategies for people: which work, how fast, at what price; then the findings and, last, the verdict."""

from collections.abc import Callable, Sequence

from ddpdiag.model import Report
from ddpdiag.model.train import Curve, Ended, ScalingRow, StrategyRow, TrainReport
from ddpdiag.render.page import Column, Page, draw, one_line, pieces
from ddpdiag.render.terminal.findings import write_findings
from ddpdiag.render.terminal.report import write_head, write_notes, write_verdict
from ddpdiag.text import ABSENT, byte_count, count, figure

_STYLES = {
    Ended.WORKS: "green",
    Ended.WRONG: "bold red",
    Ended.HANGS: "bold red",
    Ended.FAILS: "bold red",
    Ended.UNFINISHED: "bold yellow",
    Ended.NOT_COMPARED: "bold yellow",
    Ended.NOT_POSSIBLE: "dim",
}
CURVES = {Curve.STRONG: "the same batch for all ranks together", Curve.WEAK: "the same batch for each rank"}
# The reason stands below the table.
_SHORT = {Ended.UNFINISHED: "unknown", Ended.NOT_COMPARED: "unknown", Ended.NOT_POSSIBLE: "not here"}


def render(
    report: Report, *, tty: bool = False, color: bool, width: int, details: bool = False, timings: bool = False
) -> str:
    """`report.train` as text of `width` columns, in a terminal or a log; `details` shortens nothing."""
    page, train = Page(color=color, width=width), report.train
    if train is not None:
        write_head(page, report)
        page.write(f"{_ground(train)}{_task(train)}", style="dim")
        page.blank()
        _write_rows(page, train.rows)
        _write_reasons(page, train.rows)
        for curve in Curve:
            _write_curve(page, curve, [row for row in train.scaling if row.curve is curve])
    write_findings(page, report.findings, details=details)
    write_notes(page, report.notes)
    write_verdict(page, report)
    return page.text()


def _ground(train: TrainReport) -> str:
    """What it ran on: "NVIDIA H100, torch 2.13.0. "."""
    torch = f"torch {train.torch_version}" if train.torch_version else ""
    parts = ", ".join(filter(None, (one_line(train.device), one_line(torch))))
    return f"{parts}. " if parts else ""


def _task(train: TrainReport) -> str:
    asked = train.asked
    return (
        f"A ConvNet learns MNIST digits: {count(asked.steps, 'step')} of {count(train.batch_size, 'image')} over all "
        f"ranks, {one_line(asked.dtype)}. x: times as fast as single; eff.: that for each device; comm: share of time "
        "in which a collective is under way, waiting included; peak, state: memory of a rank; off: largest distance of "
        f"a loss from single's, at most {train.tolerance:.2g}."
    )


def _write_rows(page: Page, rows: Sequence[StrategyRow]) -> None:
    absent = "-"

    def column(header: str, show: Callable[[StrategyRow], str | None], *, right: bool = True) -> Column:
        return Column(header, tuple(show(row) or absent for row in rows), right=right)

    names = (
        column("strategy", lambda row: row.strategy.value, right=False),
        Column("", tuple(_word(row.ended) for row in rows), right=False, styles=tuple(_STYLES[r.ended] for r in rows)),
    )
    figures = (
        column("ranks", lambda row: str(len(row.ranks)) if row.ranks else None),
        column("samples/s", lambda row: rate_text(row.samples_per_second, absent)),
        column("x", lambda row: None if row.speedup is None else f"{row.speedup:.2f}"),
        column("eff.", lambda row: None if row.efficiency is None else f"{row.efficiency:.0%}"),
        column("comm", lambda row: None if row.communication_share is None else f"{row.communication_share:.0%}"),
        column("peak", lambda row: None if row.peak_bytes is None else byte_count(row.peak_bytes)),
        column("state", lambda row: None if row.state_bytes is None else byte_count(row.state_bytes)),
        column("off", lambda row: None if row.deviation is None else f"{row.deviation:.1g}"),
    )
    for piece in pieces(names, figures, width=page.width, gap=1):
        page.table(draw((*names, *piece), len(rows), 1))
        page.blank()


def _word(ended: Ended) -> str:
    return _SHORT.get(ended, ended.value)


def _write_reasons(page: Page, rows: Sequence[StrategyRow]) -> None:
    """Why, of those that do not work."""
    alike: dict[tuple[Ended, str], list[str]] = {}
    for row in rows:
        if row.ended is not Ended.WORKS:
            alike.setdefault((row.ended, row.reason), []).append(row.strategy.value)
    for (ended, reason), names in alike.items():
        page.write(one_line(reason), lead=f"{', '.join(names)} {ended.value}: ", lead_style=_STYLES[ended])
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
    page.write(f"ddp, {CURVES[curve]} ({curve.value} scaling):", style="bold")
    columns = (
        Column("ranks", tuple(str(row.ranks) for row in rows), right=True),
        Column("batch", tuple(f"{row.batch_size:,}" for row in rows), right=True),
        Column("samples/s", tuple(rate_text(row.samples_per_second, "-") for row in rows), right=True),
        Column("eff.", tuple("-" if row.efficiency is None else f"{row.efficiency:.0%}" for row in rows), right=True),
        Column("", tuple(_bar(row) for row in rows), right=False),
    )
    page.table(draw(columns, len(rows), 2))
    page.blank()


def _bar(row: ScalingRow) -> str:
    """A bar of twenty for an efficiency of one, or why there is none."""
    if row.ended is not Ended.WORKS or row.efficiency is None:
        return _word(row.ended)
    return "#" * min(30, round(20 * row.efficiency))


def rate_text(rate: float | None, absent: str = ABSENT) -> str:
    """Samples per second without their unit."""
    return absent if rate is None else f"{rate:,.0f}"
