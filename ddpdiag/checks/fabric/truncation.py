"""What ended a check of several rounds before it was done, and what to do about it."""

from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.model import EventKind
from ddpdiag.model.recording import TOLD_TO_LEAVE

D = TypeVar("D")


class Cut(NamedTuple):
    """Why it was cut short, as "before ..." or "when ...", and the remedy."""

    when: str
    fix: str


def cut_short(seen: Seen[D]) -> Cut:
    """By a signal, for want of time, or because ranks left; in this order, since the first explains the others."""
    kinds = {event.kind for event in seen.recording.events}
    if kinds.intersection(TOLD_TO_LEAVE):
        return Cut("when the run was told to end (RUN004)", "Run it again, and let it end.")
    if EventKind.BUDGET in kinds or any(trial.hurried for trial in seen.trials):
        budget = seen.options.budget_seconds
        return Cut(f"when the budget of {budget:g} s was spent", f"Give it more time (--budget {2 * budget:g}).")
    skip = next((skip for skip in seen.recording.skips if skip.code == seen.check.code), None)
    if skip is not None:
        return Cut(f"because {skip.reason}", "Mend that first (RUN002), or run again without these ranks.")
    lost = sorted(e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None)
    if lost:
        return Cut(f"when {ranks_text(lost)} fell silent (RUN002)", "Mend that first, or run again without them.")
    return Cut("when the run ended", "Run it again, and let it end.")
