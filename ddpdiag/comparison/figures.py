"""What changed between two snapshots: ranks against their peers, the whole machine, benchmarks, facts."""

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import chain

from msgspec import Struct

from ddpdiag.bandwidth.baseline import find, slower, worse
from ddpdiag.comparison.noise import LEAST_BUSY_ACROSS, LEAST_BUSY_WITHIN, Shift, Standing, moved, shift
from ddpdiag.comparison.peers import Field, fields, ranks_of
from ddpdiag.model.options import Figure, Sampling, Snapshot
from ddpdiag.text import rate_text, share_text, size_text, time_text

ABSENT = "none"


class Direction(Enum):
    """What a change means, the worst first. `UNJUDGED` is none: what was not held against the other run, and why."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NEUTRAL = "neutral"
    UNJUDGED = "unjudged"


class Change(Struct, frozen=True, kw_only=True):
    """Something that differs. `name` is for scripts: a finding's code, a figure's or a fact's name.

    Of a figure, `old` and `new` are medians, `ratio` says how many times as long it takes (or was slower), and `noise`
    the share by which the repeats of either run spread; None where there are none.
    """

    direction: Direction
    name: str
    text: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    noise: float | None = None


def comparable(old: Snapshot, new: Snapshot) -> str | None:
    """Why the figures of two runs cannot be held against each other, or None."""
    for name in dict.fromkeys((*old.shape, *new.shape)):
        was, now = (each.shape.get(name, "unknown") for each in (old, new))
        if was != now:
            return f"{name}: {was} then, {now} now"
    return None


def compared_figures(old: Snapshot, new: Snapshot) -> tuple[int, tuple[Change, ...]]:
    """How many figures were held against each other, and what changed."""
    if (why := comparable(old, new)) is not None:
        return 0, (_unjudged("shape", f"figures were not compared, {why}"),)
    changes = [*chain(_within(old, new), _across(old, new), _series(old, new)), *_refused(old, new)]
    if not _common(old, new) and not (old.series and new.series):
        changes.append(_unjudged("figures", "the runs have no figure in common"))
    held = sum(not isinstance(find(old.series, series), str) for series in new.series)
    return sum(_is_judged(old, new, within=within) for within in _common(old, new)) + held, tuple(changes)


def _common(old: Snapshot, new: Snapshot) -> list[bool]:
    """For each figure of the new run that the old one has, too: is it held against that of other ranks?"""
    known = _kinds(old)
    return [within for key, within in _kinds(new).items() if key in known]


def _kinds(snapshot: Snapshot) -> dict[tuple[str, int | None], bool]:
    """Of each figure, by name and rank: is it held against that of other ranks?"""
    kinds: dict[tuple[str, int | None], bool] = {
        (own.name, rank): True for own in snapshot.standings for rank in ranks_of(own)
    }
    return kinds | {(figure.name, figure.rank): figure.within for figure in snapshot.figures}


def _is_judged(old: Snapshot, new: Snapshot, *, within: bool) -> bool:
    return least_busy(old, new) >= (LEAST_BUSY_WITHIN if within else LEAST_BUSY_ACROSS)


def changed_facts(old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]) -> Iterator[Change]:
    """Versions and variables that differ, where both runs looked at them."""
    for kind in old.keys() & new.keys():
        for name in sorted({*old[kind], *new[kind]}):
            was, now = old[kind].get(name, ABSENT), new[kind].get(name, ABSENT)
            if was != now:
                yield _note(name, f"{name}: {was} -> {now}")


def _note(name: str, text: str) -> Change:
    return Change(direction=Direction.NEUTRAL, name=name, text=text)


def _unjudged(name: str, text: str) -> Change:
    return Change(direction=Direction.UNJUDGED, name=name, text=text)


def times_are_judged(old: Snapshot | None, new: Snapshot | None) -> bool:
    """Had the ranks of both runs enough of their cores? Not known where nobody looked, so no."""
    return least_busy(old, new) >= LEAST_BUSY_WITHIN


def least_busy(old: Snapshot | None, new: Snapshot | None) -> float:
    """The least share of their cores that ranks had in either run: 1 on GPUs, 0 where nobody looked."""
    return min(_own_busy(old), _own_busy(new))


def _own_busy(snapshot: Snapshot | None) -> float:
    if snapshot is None:
        return 0.0
    return 1.0 if snapshot.on_gpus else snapshot.busy_share or 0.0


def _refused(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    busy = least_busy(old, new)
    if busy < LEAST_BUSY_ACROSS and _common(old, new):
        what = "no times" if busy < LEAST_BUSY_WITHIN else "no times of the whole machine"
        why = f"in one of the runs a rank had {share_text(busy)} of its core, others the rest"
        if any(not each.on_gpus and each.busy_share is None for each in (old, new)):
            why = "in one of the runs nobody looked (TRN003 does) whether others used the cores"
        yield _unjudged("busy", f"{what} were judged: {why}")


# Ranks against their peers -------------------------------------------------------------------------------------------


def _within(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    """Ranks that fell behind, or caught up with, the others at the same moments: what disturbs all changes nothing."""
    if least_busy(old, new) < LEAST_BUSY_WITHIN:
        return
    before, now = fields(old), fields(new)
    for name in before.keys() & now.keys():
        then, here = before[name].standings, now[name].standings
        for rank in _told(then, here):
            change = moved(then[rank], here[rank])
            if change.is_beyond:
                yield _of_rank(now[name], rank, change)


def _told(then: Mapping[int, Standing], here: Mapping[int, Standing]) -> list[int]:
    """The ranks that are spoken of. Of two, one that falls behind looks like the other one that gets ahead: it is the
    one that is behind where they are further apart than they were, else the one that was behind."""
    both = sorted(then.keys() & here.keys())
    if len(both) != 2:
        return both
    was, now = (max(both, key=lambda rank: each[rank].ratio) for each in (then, here))
    return [now if here[now].ratio >= then[was].ratio else was]


def _of_rank(figure: Field, rank: int, change: Shift) -> Change:
    peers = "the other rank" if len(figure.ranks) == 2 else "the others usually"
    worse_now = change.ratio > 1
    return Change(
        direction=Direction.REGRESSION if worse_now else Direction.IMPROVEMENT,
        name=figure.name,
        text=f"rank {rank}: {figure.title} takes {change.new:.2f} times that of {peers}, {change.old:.2f} times before "
        f"({_percent(change.ratio)}; repeats spread {share_text(change.noise or 0.0)})",
        ranks=(rank,),
        old=change.old,
        new=change.new,
        ratio=change.ratio,
        noise=change.noise,
    )


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
        if shifted is not None and shifted.is_beyond:
            yield _of_world(figure, shifted)


def _direction(figure: Figure, shifted: Shift) -> Direction:
    """Of a single value no noise is known, so that it is told and not judged."""
    if figure.sampling is Sampling.SINGLE:
        return Direction.NEUTRAL
    return Direction.REGRESSION if shifted.ratio > 1 else Direction.IMPROVEMENT


def _of_world(figure: Figure, shifted: Shift) -> Change:
    show = (lambda value: f"{value:,.0f} /s") if figure.is_rate else time_text
    spread = "its noise is not known" if shifted.noise is None else f"repeats spread {share_text(shifted.noise)}"
    return Change(
        direction=_direction(figure, shifted),
        name=figure.name,
        text=f"{figure.title}: {show(shifted.old)} -> {show(shifted.new)} "
        f"({_percent(shifted.new / shifted.old)}; {spread})",
        ranks=() if figure.rank is None else (figure.rank,),
        old=shifted.old,
        new=shifted.new,
        ratio=shifted.ratio,
        noise=shifted.noise,
    )


# Benchmarks: as `allreduce-bench --baseline` does --------------------------------------------------------------------


def _series(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    ranks = int(new.shape.get("ranks", "2").split()[0])
    for series in new.series:
        held = find(old.series, series) if old.series else None
        what = f"{series.collective} over {series.backend} ({series.dtype})"
        if isinstance(held, str):
            yield _unjudged(what, f"{what} was not compared: {held}")
        elif held is not None:
            # What became better is what would be worse the other way round.
            for direction, first, second in (
                (Direction.REGRESSION, held, series),
                (Direction.IMPROVEMENT, series, held),
            ):
                if lost := worse(first, second):
                    most = max(lost, key=lambda each: each.share)
                    rates = (most.old_bytes_per_s, most.new_bytes_per_s)
                    was, now = rates if direction is Direction.REGRESSION else rates[::-1]
                    yield Change(
                        direction=direction,
                        name=what,
                        text=f"{what}: {rate_text(was)} -> {rate_text(now)} busbw at {size_text(most.size_bytes)}",
                        old=was,
                        new=now,
                        ratio=was / now,
                    )
                elif late := slower(first, second, ranks):
                    times = (late.old_seconds, late.new_seconds)
                    was, now = times if direction is Direction.REGRESSION else times[::-1]
                    yield Change(
                        direction=direction,
                        name=what,
                        text=f"{what}: small messages, {time_text(was)} -> {time_text(now)} "
                        f"at {size_text(late.size_bytes)}",
                        old=was,
                        new=now,
                        ratio=now / was,
                    )
