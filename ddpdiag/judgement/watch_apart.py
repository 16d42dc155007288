"""Ranks of a host on which silence means little: rank 0, which mostly prints alone, runs on another one.

A healthy training shows there as a hang does: some ranks wait in a collective, others are on their way to it. Only what
stands in the same place at two looks is believed.
"""

from ddpdiag.judgement.watch_words import Stands
from ddpdiag.model.watch import Judged, RankSeen, Stall

# Of a core, between two looks at a rank that does the same.
_SAME_CORES = 0.2


def is_apart(stall: Stall) -> bool:
    """Do other hosts have ranks, rank 0 among them, and no flight recorder tells of collectives?"""
    elsewhere = stall.world_size is not None and stall.world_size > len(stall.ranks)
    known = any(seen.posted_seconds is not None for seen in stall.ranks)
    return bool(stall.ranks) and elsewhere and not known and all(seen.rank != 0 for seen in stall.ranks)


def stands_as(before: Stall | None, now: Stall) -> bool:
    """Did every rank stand in the same place at an earlier look at the same silence, and use its core alike?"""
    if before is None or before.number != now.number or len(before.ranks) != len(now.ranks):
        return False
    return all(map(_alike, before.ranks, now.ranks))


def _alike(before: RankSeen, now: RankSeen) -> bool:
    if (before.rank, before.pid) != (now.rank, now.pid) or before.process is None or now.process is None:
        return False
    if before.core_share is None or now.core_share is None:
        return False
    place = bool(now.process.stack) and before.process.stack == now.process.stack
    return place and abs(before.core_share - now.core_share) <= _SAME_CORES


def apart(stall: Stall, stands: Stands) -> Judged | None:
    """Nobody is named where the training may go on, with rank 0, on another host."""
    if not is_apart(stall) or stall.unmoved:
        return None
    return Judged(
        named=(),
        title="silent here, and nothing shows whether the training goes on",
        message="Rank 0, which mostly prints alone, runs on another host. What the ranks do here is what they may do "
        "in a healthy training as well; the next look tells whether they still stand there.",
        remedy="Look at the output and the report of rank 0's host. --output FILE or --flight-recorder shows "
        "progress here.",
    )
