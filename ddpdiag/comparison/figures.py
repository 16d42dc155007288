"""What changed between two runs: ranks against their peers, the whole machine, benchmarks, rates of pairs, facts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from statistics import median

from msgspec import Struct

from ddpdiag.comparison.benchmarks import Loss, find, name_of, worst_loss
from ddpdiag.comparison.noise import (
    LEAST_BUSY_ACROSS,
    LEAST_BUSY_WITHIN,
    Shift,
    Standing,
    fields,
    moved,
    ranks_of,
    shift,
)
from ddpdiag.model import Matrix
from ddpdiag.model.bench import BenchCurve
from ddpdiag.model.options import Snapshot
from ddpdiag.stats import quantile
from ddpdiag.text import quantity, rate_text, share_text, size_text, time_text

ABSENT = "none"


class Direction(Enum):
    """What a change means, the worst first. `UNJUDGED` is none: what was not compared with the other run, and why."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NEUTRAL = "neutral"
    UNJUDGED = "unjudged"


class Change(Struct, frozen=True, kw_only=True):
    """Something that differs. `name` is for scripts: a finding's code, a figure's or a fact's name.

    Of a figure, `old` and `new` are medians, `ratio` is how many times as long it takes (or was slower), and `noise`
    the share by which the repeats of either run spread; None where there are none.
    """

    direction: Direction
    name: str
    text: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    noise: float | None = None


def incomparable(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """Why runs with these shapes cannot be compared; None if they can."""
    for name in dict.fromkeys((*old, *new)):
        was, now = (shape.get(name, "unknown") for shape in (old, new))
        if was != now:
            return f"{name}: {was} then, {now} now"
    return None


def compared_figures(old: Snapshot, new: Snapshot) -> tuple[int, tuple[Change, ...]]:
    """How many figures were compared, and what changed."""
    if (why := incomparable(old.shape, new.shape)) is not None:
        return 0, (_unjudged("shape", f"figures were not compared, {why}"),)
    curves = compared_curves(old.series, new.series) if old.series else ()
    changes = [*chain(_within(old, new), _across(old, new), curves), *_unjudged_times(old, new)]
    if not _common(old, new) and not old.series:
        changes.append(_unjudged("figures", "the runs have no figure in common"))
    held = sum(not isinstance(find(old.series, series), str) for series in new.series)
    busy = least_busy(old, new)
    judged = sum(busy >= (LEAST_BUSY_WITHIN if within else LEAST_BUSY_ACROSS) for within in _common(old, new))
    return judged + held, tuple(changes)


def _common(old: Snapshot, new: Snapshot) -> list[bool]:
    """For each figure of the new run that the old one has, too: is it compared with that of other ranks?"""
    known = _kinds(old)
    return [within for key, within in _kinds(new).items() if key in known]


def _kinds(snapshot: Snapshot) -> dict[tuple[str, int | None], bool]:
    """Of each figure, by name and rank: is it compared with that of other ranks?"""
    kinds: dict[tuple[str, int | None], bool] = {
        (own.name, rank): True for own in snapshot.standings for rank in ranks_of(own)
    }
    return kinds | {(figure.name, figure.rank): figure.within for figure in snapshot.figures}


def changed_facts(old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]) -> Iterator[Change]:
    """Versions and variables that differ, where both runs looked at them."""
    for kind in (kind for kind in old if kind in new):
        for name in sorted({*old[kind], *new[kind]}):
            was, now = old[kind].get(name, ABSENT), new[kind].get(name, ABSENT)
            if was != now:
                yield Change(direction=Direction.NEUTRAL, name=name, text=f"{name}: {was} -> {now}")


def _unjudged(name: str, text: str) -> Change:
    return Change(direction=Direction.UNJUDGED, name=name, text=text)


def least_busy(old: Snapshot | None, new: Snapshot | None) -> float:
    """The least share of their cores that ranks had in either run: 1 on GPUs, 0 where no check looked."""
    return min(0.0 if each is None else 1.0 if each.on_gpus else each.busy_share or 0.0 for each in (old, new))


def _unjudged_times(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    busy = least_busy(old, new)
    if busy < LEAST_BUSY_ACROSS and _common(old, new):
        what = "no times" if busy < LEAST_BUSY_WITHIN else "no times of the whole machine"
        why = f"in one of the runs a rank had {share_text(busy)} of its core, and other processes had the rest"
        if any(not each.on_gpus and each.busy_share is None for each in (old, new)):
            why = "in one of the runs it was not checked whether other processes used the cores (TRN003 does that)"
        yield _unjudged("busy", f"{what} were judged: {why}")


# Ranks against their peers -------------------------------------------------------------------------------------------


def _within(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    """Ranks that fell behind, or caught up with, the others at the same moments: what disturbs all changes nothing."""
    if least_busy(old, new) < LEAST_BUSY_WITHIN:
        return
    before, now = fields(old), fields(new)
    for name in (name for name in before if name in now):
        then, here = before[name].standings, now[name].standings
        for rank in _reported_ranks(then, here):
            change = moved(then[rank], here[rank])
            if change.is_beyond:
                figure = now[name]
                peers = "the other rank" if len(figure.ranks) == 2 else "the others usually"
                text = (
                    f"rank {rank}: {figure.title} takes {change.new:.2f} times that of {peers}, {change.old:.2f} times "
                    f"before ({_percent(change.ratio)}; repeats spread {share_text(change.noise or 0.0)})"
                )
                yield _shifted(figure.name, text, (rank,), change)


def _reported_ranks(then: Mapping[int, Standing], here: Mapping[int, Standing]) -> list[int]:
    """The ranks to report. Of two, one that falls behind looks like the other one that gets ahead: it is the
    one that is behind where they are further apart than they were, else the one that was behind."""
    both = sorted(then.keys() & here.keys())
    if len(both) != 2:
        return both
    was, now = (max(both, key=lambda rank: each[rank].ratio) for each in (then, here))
    return [now if here[now].ratio >= then[was].ratio else was]


def _shifted(name: str, text: str, ranks: tuple[int, ...], change: Shift) -> Change:
    old, new, ratio, noise, _ = change
    direction = Direction.REGRESSION if ratio > 1 else Direction.IMPROVEMENT
    if noise is None:  # of a single value no noise is known, so that it is reported and not judged
        direction = Direction.NEUTRAL
    return Change(direction=direction, name=name, text=text, ranks=ranks, old=old, new=new, ratio=ratio, noise=noise)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


# The whole machine ---------------------------------------------------------------------------------------------------


def _across(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    if least_busy(old, new) < LEAST_BUSY_ACROSS:
        return
    before = {(figure.name, figure.rank): figure for figure in old.figures if not figure.within}
    for figure in new.figures:
        was = None if figure.within else before.get((figure.name, figure.rank))
        shifted = shift(was, figure) if was is not None else None
        if shifted is None or not shifted.is_beyond:
            continue
        show = partial(_rate, figure.name) if figure.is_rate else time_text
        spread = "its spread is not known" if shifted.noise is None else f"repeats spread {share_text(shifted.noise)}"
        rates = f"{show(shifted.old)} -> {show(shifted.new)} ({_percent(shifted.new / shifted.old)}; {spread})"
        ranks = () if figure.rank is None else (figure.rank,)
        yield _shifted(figure.name, f"{figure.title}: {rates}", ranks, shifted)


def _rate(name: str, value: float) -> str:
    """With the unit that the name ends in; without one, of whole things."""
    return quantity(name, value) if name.endswith(("_flop_per_s", "_bytes_per_s")) else f"{value:,.0f} /s"


# Benchmarks ----------------------------------------------------------------------------------------------------------


def compared_curves(old: Sequence[BenchCurve], new: Sequence[BenchCurve]) -> Iterator[Change]:
    """Curves of benchmarks that became worse or better, and those that cannot be compared."""
    for curve in new:
        held = find(old, curve)
        name = name_of(curve)
        if isinstance(held, str):
            yield _unjudged(name, f"{name} was not compared: {held}")
        # A curve is better where it would be worse in the opposite order.
        elif loss := worst_loss(held, curve):
            yield _of_loss(name, Direction.REGRESSION, loss)
        elif gain := worst_loss(curve, held):
            yield _of_loss(name, Direction.IMPROVEMENT, gain)


def _of_loss(name: str, direction: Direction, loss: Loss) -> Change:
    """The change of a curve; the loss of an improvement is that in the opposite order."""
    is_worse = direction is Direction.REGRESSION
    was, now = (loss.old_bytes_per_s, loss.new_bytes_per_s)[:: 1 if is_worse else -1]
    what = "small messages, " if loss.is_small else ""
    rates = f"{rate_text(was)} -> {rate_text(now)} busbw at {size_text(loss.size_bytes)}"
    return Change(
        direction=direction,
        name=name,
        text=f"{name}: {what}{rates} ({share_text(loss.share)} {'slower' if is_worse else 'faster'})",
        old=was,
        new=now,
        ratio=was / now,
    )


# Rates of pairs ------------------------------------------------------------------------------------------------------

# A rate of a pair has no repeats, but a matrix has many cells: how far their changes lie apart is the noise. A link
# changed where it did so by half against the usual change of all links, and by more than three times the distance
# between the quartiles of these changes. Of fewer than four links no noise is known, and nothing is judged. Where
# others used the cores, a change is reported and not judged.

_Link = tuple[str, str]
_Rates = Mapping[_Link, float]
# Chosen, as the slow rank's (bench/slow.py): one connection varies more than the median of many calls.
_RATIO = 1.5
_DISTANCES = 3
_LEAST_LINKS = 4
_SHOWN = 8


def changed_matrices(old: Sequence[Matrix], new: Sequence[Matrix], busy_share: float = 1.0) -> Iterator[Change]:
    """Changes of all matrices of rates that both runs have. `busy_share` as in `least_busy`."""
    known = {matrix.name: matrix for matrix in old if matrix.unit == "bytes_per_s"}
    for matrix in new:
        if matrix.unit == "bytes_per_s" and matrix.name in known:
            yield from _changed(matrix, _rates(known[matrix.name]), _rates(matrix), busy_share)


def _rates(matrix: Matrix) -> dict[_Link, float]:
    return {
        (row, column): float(cell)
        for row, cells in zip(matrix.rows, matrix.cells, strict=False)
        for column, cell in zip(matrix.columns, cells, strict=False)
        if row != column and isinstance(cell, int | float) and 0 < cell < math.inf
    }


def _changed(matrix: Matrix, was: _Rates, now: _Rates, busy_share: float) -> Iterator[Change]:
    # How many times as long a byte takes, above one for worse.
    ratios = {link: was[link] / now[link] for link in now if link in was}
    if len(ratios) < _LEAST_LINKS:
        return
    logs = sorted(map(math.log, ratios.values()))
    usual = median(logs)
    noise = math.exp(quantile(logs, 0.75) - quantile(logs, 0.25)) - 1
    limit = max(math.log(_RATIO), _DISTANCES * math.log1p(noise))
    outliers = {link: ratio for link, ratio in ratios.items() if abs(math.log(ratio) - usual) >= limit}
    for direction, links in (
        (Direction.REGRESSION, [link for link in outliers if math.log(outliers[link]) > usual]),
        (Direction.IMPROVEMENT, [link for link in outliers if math.log(outliers[link]) < usual]),
    ):
        if links:
            judged = direction if busy_share >= LEAST_BUSY_WITHIN else Direction.NEUTRAL
            yield _of_links(matrix, judged, links, was, now, noise)
    if abs(usual) >= max(math.log(_RATIO), math.log1p(noise)):
        direction = Direction.REGRESSION if usual > 0 else Direction.IMPROVEMENT
        judged = direction if busy_share >= LEAST_BUSY_ACROSS else Direction.NEUTRAL
        yield _of_links(matrix, judged, [link for link in ratios if link not in outliers], was, now, noise)


def _of_links(
    matrix: Matrix, direction: Direction, links: Sequence[_Link], was: _Rates, now: _Rates, noise: float
) -> Change:
    old, new = (median(rates[link] for link in links) for rates in (was, now))
    shown = ", ".join(f"{row} -> {column}" for row, column in links[:_SHOWN])
    more = f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else ""
    return Change(
        direction=direction,
        name=matrix.name,
        text=f"{matrix.title}: {shown}{more}: {rate_text(old)} -> {rate_text(new)}",
        old=old,
        new=new,
        ratio=old / new,
        noise=noise,
    )
