"""Silence: when a process counts as lost, and what does not count as silence."""

# Rank 0 beats every second; on an overloaded machine a healthy one was seen silent for 3 s.
LOST_AFTER_SECONDS = 8.0
LOST_LATE_SECONDS = 4.0  # once the budget is spent
_FROZEN_SECONDS = 2.0


def frozen_seconds(before: float, after: float) -> float:
    """How long this process itself stood still in a wait of half a second at most; short delays count as none.

    Who was stopped (Ctrl-Z, a suspended job) heard nobody meanwhile, and that is not the others' silence.
    """
    gap = after - before
    return gap if gap > _FROZEN_SECONDS else 0.0
