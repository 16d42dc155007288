"""How long a step of the search may take: each set, and each pair, that hangs costs all of it."""

from typing import TypeVar

from ddpdiag.bandwidth import factor
from ddpdiag.checks.api import Seen
from ddpdiag.checks.p2p.fallback.conditions import before
from ddpdiag.model import Status
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONTEXT_STEP

D = TypeVar("D")

# Large enough to be bound by bandwidth between GPUs.
LARGE_ON_GPU_BYTES = 64 << 20
# Pairs get so many times what a set that works took, and at least so much; so does each set for its start.
_PATIENCE, _LEAST_DEADLINE = 3.0, 5.0


def pairs_deadline(seen: Seen[D], usual: float) -> float:
    """Less than usual where sets that work show how long that takes: each pair that hangs costs all of it."""
    slowest = _slowest_seconds(seen)
    if slowest is None or f"{seen.check.code}.deadline_seconds" in seen.options.settings:
        return usual
    return min(usual, max(_LEAST_DEADLINE, _PATIENCE * slowest))


def _slowest_seconds(seen: Seen[D]) -> float | None:
    """What the slowest trial took that went well; None if none did."""
    worked = [trial.number for trial in seen.trials if seen.went_well(trial)]
    return max((outcome.seconds for outcome in seen.outcomes if outcome.trial in worked), default=None)


def set_deadline(seen: Seen[D], usual: float) -> float:
    """Less than usual where gloo worked: each set that hangs costs all of it, and one that is far slower is no help."""
    gloo = before(seen, "gloo")
    if gloo is None or not gloo.busbw or f"{seen.check.code}.deadline_seconds" in seen.options.settings:
        return usual
    # The all-reduce runs twice at least, at a rate that may be worse than gloo's by slower_than_gloo.
    moved = 2 * LARGE_ON_GPU_BYTES * factor("all_reduce", seen.world.size)
    seconds = max(seen.number("slower_than_gloo") * moved / gloo.busbw, _slowest_seconds(seen) or 0.0)
    # What the number of ranks adds to the usual one stays.
    return min(usual, usual - seen.check.deadline + max(_LEAST_DEADLINE, _PATIENCE * seconds))


def first_use_seconds(seen: Seen[D]) -> float:
    """What each set may take to start, by what that took before: a set that hangs there costs all of it."""
    done = [outcome.timings for outcome in seen.recording.outcomes if outcome.status is Status.DONE]
    slowest = max((own.get(CONTEXT_STEP, 0.0) + own.get(COMMUNICATOR_STEP, 0.0) for own in done), default=0.0)
    return max(_LEAST_DEADLINE, _PATIENCE * slowest)
