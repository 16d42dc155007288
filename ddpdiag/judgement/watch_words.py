"""A look at a silent training in words: who does what, and who stands alike."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ddpdiag.checks.collective_traces import in_words, last
from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.judgement.standing import Stand, call_of, is_busy, place_of
from ddpdiag.model.watch import RankSeen, Stall, Standing

Stands = Mapping[int, Stand]

_MOST_STACKS = 4


def agree(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def rank_seen(stall: Stall, rank: int) -> RankSeen:
    return next(seen for seen in stall.ranks if seen.rank == rank)


def those(stands: Stands, *kinds: Stand) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, own in stands.items() if own in kinds))


def begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def for_whom(stall: Stall, stands: Stands, ranks: Sequence[int]) -> str:
    waiting = tuple(rank for rank in those(stands, Stand.WAITING) if rank not in ranks)
    if not waiting:
        return ""
    return f" {begun(ranks_text(waiting))} {agree(waiting, 'waits', 'wait')} in {calls_text(stall, waiting)}."


def calls_text(stall: Stall, ranks: Sequence[int]) -> str:
    """The collective in which they wait: from the flight recorder, else the name of the call."""
    seen = [rank_seen(stall, rank) for rank in ranks]
    ends = {in_words(end) for own in seen if (end := last(own.flight)) is not None}
    calls = dict.fromkeys(call_of(own.process) for own in seen if own.process is not None)
    return ", ".join(sorted(ends)) if ends else " and ".join(filter(None, calls)) or "a collective"


def where_text(stall: Stall, ranks: Sequence[int]) -> str:
    doing = dict.fromkeys(doing_text(rank_seen(stall, rank)) for rank in ranks)
    return f": {agree(ranks, 'it is', 'they are')} {'; '.join(list(doing)[:4])}"


def which_is(stall: Stall, ranks: Sequence[int]) -> str:
    """Where a single one is, for a title."""
    process = rank_seen(stall, ranks[0]).process
    return f", which is in {process.stack[0]}" if len(ranks) == 1 and process is not None and process.stack else ""


def doing_text(seen: RankSeen) -> str:
    """Such as "running, holding the GIL, in spin (train.py:7)"."""
    process = seen.process
    if process is None:
        return "gone"
    use = ", using a core" if is_busy(seen) else ""
    gil = ", holding the GIL" if seen.holds_gil else ""
    return state_text(process) + use + gil + (f", in {process.stack[0]}" if process.stack else "")


def standings(stall: Stall, named: Sequence[int]) -> tuple[Standing, ...]:
    groups: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for seen in stall.ranks:
        groups[seen.rank not in named, _standing(seen)].append(seen.rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    return tuple(Standing(ranks=tuple(ranks), text=text) for (_, text), ranks in ordered)


def _standing(seen: RankSeen) -> str:
    """How one rank stands, without what differs between ranks that stand alike."""
    process = seen.process
    if process is None:
        return "gone"
    text = state_text(process) + (f" in {place_of(process)})" if process.stack else "")
    if not process.stack and process.wchan:
        text += f" in the kernel's {process.wchan}"
    if is_busy(seen):
        text += ", using a core"
    end = last(seen.flight)
    if end is not None:
        text += f"; last posted {in_words(end)}"
    elif seen.flight is not None:
        text += "; posted nothing"
    return text


def stacks(stall: Stall, named: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Of some of the named, and of one of those that wait."""
    known = [(seen.rank, seen.process.stack) for seen in stall.ranks if seen.process and seen.process.stack]
    first = [row for row in known if row[0] in named][:_MOST_STACKS]
    others = [row for row in known if row[0] not in named][:1]
    return {f"rank {rank}": stack for rank, stack in (*first, *others)}


def notes(stall: Stall) -> tuple[str, ...]:
    """What could not be seen, and why."""
    guessed = "No variable names the ranks, so they are numbered in the order of their start."
    stackless = _reasons("No stack", {seen.rank: seen.no_stack for seen in stall.ranks})
    # Only NCCL can be asked, so that a job without GPUs lacks nothing.
    unflown = _reasons("No collectives", {seen.rank: seen.no_flight for seen in stall.ranks if seen.holds_gpu})
    return (*stall.notes, *stackless, *unflown, *([guessed] if stall.guessed and len(stall.ranks) > 1 else []))


def _reasons(what: str, by_rank: Mapping[int, str]) -> list[str]:
    """A sentence for each reason, with its ranks."""
    reasons: dict[str, list[int]] = defaultdict(list)
    for rank, reason in by_rank.items():
        if reason:
            reasons[reason].append(rank)
    return [f"{what} of {ranks_text(ranks)}: {reason}." for reason, ranks in reasons.items()]
