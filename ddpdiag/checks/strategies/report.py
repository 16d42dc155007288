"""The table of TRN002 from a recording."""

from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.checks.strategies.data import Data, asked_of
from ddpdiag.checks.strategies.jobs import batch_of, devices_of, job_of, points, why_not
from ddpdiag.checks.strategies.view import Run, mean_losses, run_of, runs
from ddpdiag.model.train import Ended, ScalingRow, Strategy, StrategyRow, TrainReport

# The last loss is the mean over so many steps: one is noisy.
_LAST_STEPS = 5
# Caches may give a little more than one.
_MOST_EFFICIENCY = 1.25
_NOT_TRIED = "the run ended before it"


def train_of(seen: Seen[Data], tolerance: float) -> TrainReport:
    """Rows and curves."""
    asked = asked_of(seen.options)
    rows = tuple(_rows(seen, tolerance))
    versions = seen.of(lch003.CHECK).by_rank
    return TrainReport(
        asked=asked,
        batch_size=batch_of(seen.world),
        device=next((data.device for run in runs(seen, tolerance) for data in run.data.values() if data.device), ""),
        rows=rows,
        scaling=tuple(_scaling(seen, tolerance)) if asked.scaling else (),
        tolerance=tolerance,
        sentence=_sentence(rows),
        torch_version=next((data.torch for data in versions.values()), None),
    )


def _rows(seen: Seen[Data], tolerance: float) -> Iterator[StrategyRow]:
    """A line for each strategy that was asked for, and one for single, where it was run."""
    asked = asked_of(seen.options).strategies
    alone = job_of(Strategy.SINGLE, seen.world)
    first = run_of(seen, alone, tolerance) if alone is not None else None
    rate = first.rate if first is not None else None
    for strategy in dict.fromkeys((Strategy.SINGLE, *asked) if first is not None else asked):
        yield _row(seen, strategy, rate, tolerance)


def _row(seen: Seen[Data], strategy: Strategy, rate_alone: float | None, tolerance: float) -> StrategyRow:
    if reason := why_not(strategy, seen.world):
        return StrategyRow(strategy=strategy, ended=Ended.NOT_POSSIBLE, reason=reason)
    job = job_of(strategy, seen.world)
    run = run_of(seen, job, tolerance) if job is not None else None
    if job is None or run is None:
        return StrategyRow(strategy=strategy, ended=Ended.UNFINISHED, reason=_NOT_TRIED)
    devices = devices_of(job, seen.world)
    speedup = run.rate / rate_alone if run.rate is not None and rate_alone else None
    shares = [own.communication_share for own in run.data.values() if own.communication_share is not None]
    losses = mean_losses(run)
    return StrategyRow(
        strategy=strategy,
        ended=run.ended,
        reason=run.reason,
        ranks=job.ranks,
        devices=devices,
        samples_per_second=run.rate,
        speedup=speedup,
        efficiency=speedup / devices if speedup is not None else None,
        peak_bytes=_largest([own.peak_bytes for own in run.data.values()]),
        state_bytes=_largest([own.state_bytes for own in run.data.values()]),
        communication_share=sum(shares) / len(shares) if shares else None,
        deviation=run.apart.most if run.apart is not None else None,
        first_loss=losses[0] if losses else None,
        last_loss=sum(losses[-_LAST_STEPS:]) / len(losses[-_LAST_STEPS:]) if losses else None,
    )


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _scaling(seen: Seen[Data], tolerance: float) -> Iterator[ScalingRow]:
    alone = job_of(Strategy.SINGLE, seen.world)
    first = run_of(seen, alone, tolerance) if alone is not None else None
    for curve, job in points(seen.world):
        run = run_of(seen, job, tolerance)
        yield ScalingRow(
            curve=curve,
            ranks=len(job.ranks),
            batch_size=job.batch,
            ended=run.ended if run is not None else Ended.UNFINISHED,
            reason=run.reason if run is not None else _NOT_TRIED,
            samples_per_second=run.rate if run is not None else None,
            efficiency=_efficiency(run, first),
        )


def _efficiency(run: Run | None, alone: Run | None) -> float | None:
    if run is None or run.rate is None or alone is None or not alone.rate:
        return None
    return run.rate / alone.rate / len(run.job.ranks)


def _sentence(rows: Sequence[StrategyRow]) -> str:
    """Which way works and pays."""
    worked = [row for row in rows if row.ended is Ended.WORKS and row.samples_per_second is not None]
    if not worked:
        return "No strategy trained to the end."
    several = [row for row in worked if row.strategy is not Strategy.SINGLE]
    said = f"{_names(worked)} {'works' if len(worked) == 1 else 'work'} here"
    if not several:
        others = all(row.ended is Ended.NOT_POSSIBLE for row in rows if row.strategy is not Strategy.SINGLE)
        return f"{said}{'; nothing else could be tried' if others and len(rows) > 1 else ''}."
    best = max(several, key=lambda row: row.samples_per_second or 0.0)
    return f"{said}; {_best_text(best)}."


def _best_text(best: StrategyRow) -> str:
    rate, name = f"{best.samples_per_second or 0.0:,.0f} samples/s", best.strategy.value
    if best.speedup is None or best.efficiency is None:
        return f"{name} is the fastest of several processes, {rate}"
    if best.speedup <= 1:
        return f"none is faster than one process alone: the best is {name}, {rate}, {best.speedup:.2f} x its speed"
    if best.efficiency > _MOST_EFFICIENCY:
        return (
            f"{name} is the fastest, {rate}; {best.speedup:.2f} x one process alone is more than {best.devices} "
            "devices can give, so something slowed that one down: run it again on a quiet host"
        )
    where = f"{len(best.ranks)} ranks" if best.devices == len(best.ranks) else f"{best.devices} devices"
    return (
        f"{name} is the fastest, {rate}: {best.speedup:.2f} x one process alone on {where} "
        f"(efficiency {best.efficiency:.0%})"
    )


def _names(rows: Sequence[StrategyRow]) -> str:
    names = [row.strategy.value for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
