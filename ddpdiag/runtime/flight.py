"""A trial that was handed out, until its last outcome."""

import time

from ddpdiag.model import Trial

# What a supervisor needs after its deadline: 0.5 s for the dump, 2 s for the kill, and the way here.
SLACK_SECONDS = 4.0


class Flight:
    """Who has still to answer, who stands at the gate, and which groups have failed since when."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.pending = set(trial.ranks)
        self.offers: dict[int, str] = {}
        self.failed: dict[tuple[int, ...], float] = {}
        self.stopped: set[tuple[int, ...]] = set()
        self._begin = time.monotonic()
        self.latest = self._begin + trial.deadline_seconds + SLACK_SECONDS

    def age(self) -> float:
        """Seconds since it was handed out."""
        return time.monotonic() - self._begin

    def fail(self, rank: int) -> None:
        """Note that somebody in this rank's group failed."""
        self.failed.setdefault(self.trial.group_of(rank), time.monotonic())
