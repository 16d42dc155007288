"""Two reports held against each other: verdicts, findings, figures, rates of pairs, what they ran on.

A rate of a pair has no repeats, but a matrix has many cells: how far their changes lie apart is the noise.
A way changed where it did so by half against the usual change of all ways, and by more than three times the distance
between the quartiles of these changes. Of fewer than four ways no noise is known, and nothing is judged. Where others
used the cores, a change is told and not judged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct

from ddpdiag.compare.findings import changed_findings
from ddpdiag.comparison.figures import Change, Direction, changed_facts, compared_figures, least_busy
from ddpdiag.comparison.noise import LEAST_BUSY_ACROSS, LEAST_BUSY_WITHIN
from ddpdiag.errors import ExitCode
from ddpdiag.model import Matrix, Report, Verdict
from ddpdiag.stats import quantile
from ddpdiag.text import rate_text

SCHEMA = "ddpdiag.comparison/1"
_VERDICTS = (Verdict.FIT, Verdict.UNKNOWN, Verdict.UNFIT)
_ORDER = tuple(Direction)
_WORDS = {direction: direction.value for direction in Direction} | {
    Direction.NEUTRAL: "other change",
    Direction.UNJUDGED: "reason not to judge",
}


class Side(Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    source: str
    run_id: str
    created: str
    verdict: str
    sentence: str


class Comparison(Struct, frozen=True, kw_only=True):
    """What changed, regressions first; `compared` counts the figures that could be held against each other."""

    schema: str = SCHEMA
    old: Side
    new: Side
    changes: tuple[Change, ...]
    compared: int
    sentence: str
    exit_code: int


def compare(old: Report, new: Report, *, old_source: str, new_source: str) -> Comparison:
    """What changed from the old run to the new one."""
    count, figures = _figures(old, new)
    changes = [
        *_verdict(old, new),
        *changed_findings(old, new),
        *figures,
        *changed_matrices(old.matrices, new.matrices, least_busy(old.snapshot, new.snapshot)),
        *_world(old, new),
        *_facts(old, new),
    ]
    changes.sort(key=lambda change: _ORDER.index(change.direction))
    return Comparison(
        old=_side(old, old_source),
        new=_side(new, new_source),
        changes=tuple(changes),
        compared=count,
        sentence=_sentence(changes, count),
        exit_code=_exit_code(changes, count, new.verdict),
    )


def _exit_code(changes: list[Change], count: int, verdict: Verdict) -> ExitCode:
    """That nothing was held against each other, or that the new run could not look, is no good news."""
    if any(change.direction is Direction.REGRESSION for change in changes):
        return ExitCode.UNFIT
    return ExitCode.FIT if count and verdict is not Verdict.UNKNOWN else ExitCode.UNKNOWN


def _side(report: Report, source: str) -> Side:
    created = report.snapshot.created if report.snapshot else ""
    return Side(
        source=source, run_id=report.run_id, created=created, verdict=report.verdict.value, sentence=report.sentence
    )


def _sentence(changes: list[Change], count: int) -> str:
    parts = []
    for direction in _ORDER:
        if number := sum(change.direction is direction for change in changes):
            parts.append(_counted(number, _WORDS[direction]))
    changed = any(change.direction is not Direction.UNJUDGED for change in changes)
    none = "nothing changed" if count else "no change was seen"
    of = f"{_counted(count, 'figure')} compared" if count else "no figure was compared"
    return f"{', '.join(parts if changed else [none, *parts])}; {of}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _verdict(old: Report, new: Report) -> Iterator[Change]:
    """A run that could not look is worse than one that was fit, and does not say that one became better."""
    if old.verdict is not new.verdict:
        better = _VERDICTS.index(new.verdict) < _VERDICTS.index(old.verdict)
        cured = Direction.NEUTRAL if new.verdict is Verdict.UNKNOWN else Direction.IMPROVEMENT
        yield Change(
            direction=cured if better else Direction.REGRESSION,
            name="verdict",
            text=f"verdict: {old.verdict.value.upper()} -> {new.verdict.value.upper()}: {new.sentence}",
        )


def _figures(old: Report, new: Report) -> tuple[int, tuple[Change, ...]]:
    if old.snapshot is None or new.snapshot is None:
        which = "first" if old.snapshot is None else "second"
        text = f"figures were not compared: the {which} report is of a ddpdiag that kept none; give its recording"
        return 0, (Change(direction=Direction.UNJUDGED, name="figures", text=text),)
    return compared_figures(old.snapshot, new.snapshot)


def _world(old: Report, new: Report) -> Iterator[Change]:
    for name, was, now in (
        ("launcher", old.world.launcher, new.world.launcher),
        ("hosts", ", ".join(sorted(old.world.nodes)), ", ".join(sorted(new.world.nodes))),
    ):
        if was != now:
            yield Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {was} -> {now}")


def _facts(old: Report, new: Report) -> Iterator[Change]:
    if old.snapshot is not None and new.snapshot is not None:
        yield from changed_facts(old.snapshot.facts, new.snapshot.facts)


Way = tuple[str, str]
# Chosen, as the slow rank's (bench/slow.py): one connection varies more than the median of many calls.
_RATIO = 1.5
_DISTANCES = 3
_LEAST_WAYS = 4
_SHOWN = 8


def changed_matrices(old: Sequence[Matrix], new: Sequence[Matrix], busy_share: float = 1.0) -> Iterator[Change]:
    """Changes of all matrices of rates that both runs have. `busy_share` as in `least_busy`."""
    known = {matrix.name: matrix for matrix in old if matrix.unit == "bytes_per_s"}
    for matrix in new:
        if matrix.unit == "bytes_per_s" and matrix.name in known:
            yield from _changed(matrix, _rates(known[matrix.name]), _rates(matrix), busy_share)


def _rates(matrix: Matrix) -> dict[Way, float]:
    return {
        (row, column): float(cell)
        for row, cells in zip(matrix.rows, matrix.cells, strict=False)
        for column, cell in zip(matrix.columns, cells, strict=False)
        if row != column and isinstance(cell, int | float) and 0 < cell < math.inf
    }


def _changed(matrix: Matrix, was: Mapping[Way, float], now: Mapping[Way, float], busy_share: float) -> Iterator[Change]:
    # How many times as long a byte takes, above one for worse.
    ratios = {way: was[way] / now[way] for way in now if way in was}
    if len(ratios) < _LEAST_WAYS:
        return
    logs = sorted(map(math.log, ratios.values()))
    usual = median(logs)
    noise = math.exp(quantile(logs, 0.75) - quantile(logs, 0.25)) - 1
    limit = max(math.log(_RATIO), _DISTANCES * math.log1p(noise))
    far = {way: ratio for way, ratio in ratios.items() if abs(math.log(ratio) - usual) >= limit}
    for direction, ways in (
        (Direction.REGRESSION, [way for way in far if math.log(far[way]) > usual]),
        (Direction.IMPROVEMENT, [way for way in far if math.log(far[way]) < usual]),
    ):
        if ways:
            judged = direction if busy_share >= LEAST_BUSY_WITHIN else Direction.NEUTRAL
            yield _of_ways(matrix, judged, ways, was, now, noise)
    if abs(usual) >= max(math.log(_RATIO), math.log1p(noise)):
        direction = Direction.REGRESSION if usual > 0 else Direction.IMPROVEMENT
        judged = direction if busy_share >= LEAST_BUSY_ACROSS else Direction.NEUTRAL
        yield _of_ways(matrix, judged, [way for way in ratios if way not in far], was, now, noise)


def _of_ways(
    matrix: Matrix,
    direction: Direction,
    ways: Sequence[Way],
    was: Mapping[Way, float],
    now: Mapping[Way, float],
    noise: float,
) -> Change:
    old, new = (median(rates[way] for way in ways) for rates in (was, now))
    shown = ", ".join(f"{row} -> {column}" for row, column in ways[:_SHOWN])
    more = f" and {len(ways) - _SHOWN} more" if len(ways) > _SHOWN else ""
    return Change(
        direction=direction,
        name=matrix.name,
        text=f"{matrix.title}: {shown}{more}: {rate_text(old)} -> {rate_text(new)}",
        old=old,
        new=new,
        ratio=old / new,
        noise=noise,
    )
