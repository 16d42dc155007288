"""What changed between two snapshots: ranks against their peers, the whole machine, benchmarks, facts. Pure."""

from collections.abc import Iterator, Mapping
from itertools import chain

from ddpdiag.bandwidth.baseline import find, slower, worse
from ddpdiag.bandwidth.text import rate_text, share_text, size_text, time_text
from ddpdiag.comparison.noise import LEAST_BUSY_ACROSS, LEAST_BUSY_WITHIN, Shift, moved, quicker_half, shift, standings
from ddpdiag.model.comparison import Change, Direction
from ddpdiag.model.snapshot import Figure, Snapshot

# A fact that one run does not have is told so.
ABSENT = "unset"
_KEPT = 0.05


def comparable(old: Snapshot, new: Snapshot) -> str | None:
    """Why the figures of two runs cannot be held against each other, or None."""
    for name in dict.fromkeys((*old.shape, *new.shape)):
        was, now = (each.shape.get(name, "unknown") for each in (old, new))
        if was != now:
            return f"{name}: {was} then, {now} now"
    return None


def compared_figures(old: Snapshot, new: Snapshot) -> tuple[int, tuple[Change, ...]]:
    """How many figures could be held against each other, and what changed."""
    if (why := comparable(old, new)) is not None:
        return 0, (_note("shape", f"figures were not compared, {why}"),)
    changes = [*chain(_within(old, new), _across(old, new), _series(old, new)), *_refused(old, new)]
    both = {(f.name, f.rank) for f in old.figures} & {(f.name, f.rank) for f in new.figures}
    if not both and not (old.series and new.series):
        changes.append(_note("figures", "the runs have no figure in common"))
    return len(both) + sum(not isinstance(find(old.series, series), str) for series in new.series), tuple(changes)


def changed_facts(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """Versions and variables that differ."""
    for name in sorted({*old, *new}):
        was, now = old.get(name, ABSENT), new.get(name, ABSENT)
        if was != now:
            yield _note(name, f"{name}: {was} -> {now}")


def _note(name: str, text: str) -> Change:
    return Change(direction=Direction.NEUTRAL, name=name, text=text)


def _busy(old: Snapshot, new: Snapshot) -> float:
    """The least share of their cores that ranks had in either run; 1 where nobody looked (GPUs)."""
    return min(1.0 if each.busy_share is None else each.busy_share for each in (old, new))


def _refused(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    busy = _busy(old, new)
    if busy < LEAST_BUSY_ACROSS and any(f.values for f in new.figures):
        what = "no times" if busy < LEAST_BUSY_WITHIN else "no times of the whole machine"
        yield _note(
            "busy", f"{what} were judged: in one of the runs a rank had {share_text(busy)} of its core, others the rest"
        )


def _by_name(snapshot: Snapshot, *, within: bool) -> dict[str, dict[int | None, Figure]]:
    found: dict[str, dict[int | None, Figure]] = {}
    for figure in snapshot.figures:
        if figure.within is within:
            found.setdefault(figure.name, {})[figure.rank] = figure
    return found


# Ranks against their peers -------------------------------------------------------------------------------------------


def _within(old: Snapshot, new: Snapshot) -> Iterator[Change]:
    """Ranks that fell behind, or caught up with, the others at the same moments: what disturbs all changes nothing."""
    if _busy(old, new) < LEAST_BUSY_WITHIN:
        return
    before, now = _by_name(old, within=True), _by_name(new, within=True)
    for name in before.keys() & now.keys():
        was, is_ = _ranks(before[name]), _ranks(now[name])
        then, here = standings(was), standings(is_)
        for rank in sorted(then.keys() & here.keys()):
            change = moved(then[rank], here[rank])
            if change.is_beyond and (len(is_) > 2 or _is_own(rank, change, was, is_)):
                yield _of_rank(is_[rank], rank, change, len(is_))


def _ranks(figures: Mapping[int | None, Figure]) -> dict[int, Figure]:
    return {rank: figure for rank, figure in figures.items() if rank is not None}


def _is_own(rank: int, change: Shift, was: Mapping[int, Figure], now: Mapping[int, Figure]) -> bool:
    """Of two ranks, one that falls behind looks like the other one that gets ahead: whose own figure changed more?"""
    (other,) = now.keys() - {rank}
    behind = rank if change.ratio > 1 else other
    kept = abs(quicker_half(now[behind].values) / quicker_half(was[behind].values) - 1) < _KEPT
    # If the one behind is as quick as ever, the other one got ahead; else it is the loss of the one that is behind.
    return kept is (change.ratio < 1)


def _of_rank(figure: Figure, rank: int, change: Shift, size: int) -> Change:
    peers = "the other rank" if size == 2 else "the others usually"
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
    if _busy(old, new) < LEAST_BUSY_ACROSS:
        return
    before, now = _by_name(old, within=False), _by_name(new, within=False)
    for name in before.keys() & now.keys():
        for rank in before[name].keys() & now[name].keys():
            figure = now[name][rank]
            shifted = shift(before[name][rank], figure)
            if shifted is not None and shifted.is_beyond:
                yield _of_world(figure, shifted)


def _of_world(figure: Figure, shifted: Shift) -> Change:
    show = (lambda value: f"{value:,.0f} /s") if figure.is_rate else time_text
    spread = "its noise is not known" if shifted.noise is None else f"repeats spread {share_text(shifted.noise)}"
    return Change(
        direction=Direction.REGRESSION if shifted.ratio > 1 else Direction.IMPROVEMENT,
        name=figure.name,
        text=f"{figure.title}: {show(shifted.old)} -> {show(shifted.new)} ({_percent(shifted.new / shifted.old)}; {spread})",
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
            yield _note(what, f"{what} was not compared: {held}")
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
