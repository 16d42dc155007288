"""The tables and texts that a report shows for trainings by strategies, and for a comparison of launchers."""

from collections.abc import Iterable, Iterator

from ddpdiag.model import Report
from ddpdiag.model.train import StrategyRow, StrategyStatus, TrainReport
from ddpdiag.render.blocks import Block, Cell, Column, Mark, Section, Table, Text
from ddpdiag.strategies.launchers import LauncherRow, LaunchersReport
from ddpdiag.text import count, seconds

_MARKS = {
    StrategyStatus.WORKS: Mark.GOOD,
    StrategyStatus.WRONG: Mark.ERROR,
    StrategyStatus.HANGS: Mark.ERROR,
    StrategyStatus.FAILS: Mark.ERROR,
    StrategyStatus.UNFINISHED: Mark.WARNING,
    StrategyStatus.NOT_POSSIBLE: Mark.DIM,
}


def status_cell(value: StrategyStatus) -> Cell:
    """The cell that shows an outcome in a table. `reason_texts` gives the reasons below the table."""
    return Cell("not here" if value is StrategyStatus.NOT_POSSIBLE else value.value, _MARKS[value])


def reason_texts(rows: Iterable[tuple[str, StrategyStatus, str]]) -> Iterator[Text]:
    """Yield a text for each reason why a row (name, outcome, reason) does not work, with all names that share it."""
    names_by_outcome: dict[tuple[StrategyStatus, str], list[str]] = {}
    for name, outcome, reason in rows:
        if outcome is not StrategyStatus.WORKS:
            names_by_outcome.setdefault((outcome, reason), []).append(name)
    for (outcome, reason), failed_names in names_by_outcome.items():
        yield Text(f"{', '.join(failed_names)} {outcome.value}: {reason}", mark=_MARKS[outcome])


def blocks(report: Report) -> Iterator[Section]:
    """Yield the section with the table of strategies and the reasons why some do not work, if the run trained any."""
    train = report.train
    if train is not None:
        torch = f"torch {train.torch_version}" if train.torch_version else ""
        setting = ", ".join(filter(None, (train.device, torch)))
        yield Section(
            "Strategies",
            (
                Text(
                    f"A ConvNet learns MNIST digits: {count(train.request.steps, 'step')} of "
                    f"{count(train.batch_size, 'image')} over all ranks; {setting}."
                ),
                _strategy_table(train),
                *reason_texts((row.strategy.value, row.status, row.reason) for row in train.rows),
            ),
            name="strategies",
        )


def _strategy_table(train: TrainReport) -> Table:
    return Table(
        columns=(
            Column("strategy"),
            Column(""),
            Column("ranks"),
            Column("samples/s", bar=True),
            Column("x"),
            Column("eff.", "efficiency_share"),
            Column("peak", "peak_bytes"),
            Column("state", "state_bytes"),
        ),
        rows=tuple(map(_strategy_row, train.rows)),
        note="x: times as fast as single; eff.: that for each device; peak, state: memory of a rank. A strategy works "
        f"if each loss is within {train.tolerance:.2g} of single's.",
    )


def _strategy_row(row: StrategyRow) -> tuple[str | float | Cell | None, ...]:
    return (
        row.strategy.value,
        status_cell(row.status),
        len(row.ranks) or None,
        row.samples_per_second,
        row.speedup,
        row.efficiency,
        row.peak_bytes,
        row.state_bytes,
    )


def launcher_blocks(report: LaunchersReport) -> Iterator[Block]:
    """Yield the table of launchers, the reasons why some of them do not work, and the verdict."""
    training, rows = report.training, report.rows
    ranks = f"{count(training.ranks, 'rank')} on {report.host} ({count(report.cores, 'core')})"
    facts = ", ".join(filter(None, (ranks, report.setting)))
    yield Text(f"{facts}; took {seconds(report.seconds)}", "ddpdiag")
    yield Table(
        columns=(
            Column("started by"),
            Column(""),
            Column("start", "start_seconds"),
            Column("x"),
            Column("step", "step_seconds"),
            Column("x"),
            Column("threads"),
        ),
        rows=tuple(_launcher_row(row, rows[0]) for row in rows),
        note=f"The same training, started by each launcher: {count(training.steps, 'step')} of "
        f"{count(training.batch_size, 'image')} over all ranks in DistributedDataParallel. "
        "start: from the command to the group of all ranks; step: the median of the slowest rank; "
        "x: times torchrun's; threads: of each rank.",
    )
    yield from reason_texts((row.method.value, row.status, row.reason) for row in rows)
    mark = {0: Mark.GOOD, 1: Mark.ERROR}.get(report.exit_code, Mark.WARNING)
    yield Text(report.sentence, mark=mark)


def _launcher_row(row: LauncherRow, torchrun: LauncherRow) -> tuple[str | float | Cell | None, ...]:
    threads = sorted({min(row.threads), max(row.threads)}) if row.threads else []
    return (
        row.method.value,
        status_cell(row.status),
        row.start_seconds,
        _ratio(row.start_seconds, torchrun.start_seconds),
        row.step_seconds,
        _ratio(row.step_seconds, torchrun.step_seconds),
        "-".join(map(str, threads)) or None,
    )


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None
