"""Silence: when a process counts as lost, and what does not count as silence."""

import os

from ddpdiag.checks.world import USUAL_RANKS_PER_CORE

# Rank 0 beats every second, and more slowly in a world of more than 5,000 ranks; on an overloaded machine a healthy one
# was seen silent for 3 s.
LOST_AFTER_SECONDS = 8.0
LOST_LATE_SECONDS = 4.0  # once the budget is spent
_FROZEN_SECONDS = 2.0
# 32 ranks on a core, all of them importing torch: healthy ones came after 15 s, or were silent for more than 6 s.
_SILENT_PER_RANK_ON_CORE = 0.5


# With 10,000 ranks a beat every second held up those who were still arriving.
BEAT_PER_RANK = 2e-4
_BEATS = 5


def silence_seconds(world_size: int, *, late: bool = False) -> float:
    """After which silence rank 0 is lost; `late`: once the budget is spent."""
    return max(LOST_LATE_SECONDS if late else LOST_AFTER_SECONDS, _BEATS * BEAT_PER_RANK * world_size)


def crowded_silence_seconds(ranks_here: int | None) -> float:
    """What a healthy process may be silent longer, and come later, where so many ranks share this host's cores."""
    cores = len(os.sched_getaffinity(0)) or 1
    return _SILENT_PER_RANK_ON_CORE * max(0.0, (ranks_here or 1) / cores - USUAL_RANKS_PER_CORE)


def frozen_seconds(before: float, after: float) -> float:
    """How long this process itself stood still in a wait of half a second at most; short delays count as none.

    Who was stopped (Ctrl-Z, a suspended job) heard nobody meanwhile, and that is not the others' silence.
    """
    gap = after - before
    return gap if gap > _FROZEN_SECONDS else 0.0
