"""A trial that was handed out, until its last outcome."""

from collections.abc import Callable

from msgspec import Raw, structs

from ddpdiag.model import Trial
from ddpdiag.runtime.messages import Order

# What a supervisor needs after its deadline: 1 s for dump and NCCL's report, 2 s for the kill, and the way here.
SLACK_SECONDS = 4.5
_REPEAT_SECONDS = 2.0
# Nobody is late sooner than this, however quick others are, nor where there are fewer groups.
_LEAST_LATE_SECONDS = 5.0
_LEAST_TO_COMPARE = 2


class Flight:
    """Who has still to answer, who stands at the gate, and which groups have failed since when."""

    def __init__(self, trial: Trial, patience_seconds: float, clock: Callable[[], float]) -> None:
        self.trial = trial
        self._clock = clock
        self.pending = set(trial.ranks)
        self.offers: dict[int, str] = {}
        self.so_far: dict[int, Raw] = {}
        self.shares = False  # must everybody learn everybody's offer?
        self.failed: dict[tuple[int, ...], float] = {}
        self._ended: list[float] = []  # ages at which groups were done
        self._open = {rank: len(group) for group in trial.groups for rank in group[:1]}  # by first rank
        self.stopped: set[tuple[int, ...]] = set()
        self._begin = self._clock()
        self._repeated = self._begin
        self.latest = self._begin + patience_seconds

    def order(self, rank: int) -> Order:
        """The trial as one rank gets it: with its own group only, since thousands of others would not fit the wire."""
        return Order(structs.replace(self.trial, groups=(self.trial.group_of(rank),)))

    def time_to_repeat(self) -> bool:
        """Is it time to say again what may have been lost?"""
        due = self._clock() - self._repeated > _REPEAT_SECONDS
        if due:
            self._repeated = self._clock()
        return due

    def age(self) -> float:
        """Seconds since it was handed out."""
        return self._clock() - self._begin

    def done(self, rank: int) -> None:
        """Note that a rank has done its part."""
        first = self.trial.group_of(rank)[0]
        self._open[first] -= 1
        if not self._open[first]:
            self._ended.append(self.age())

    def late(self) -> bool:
        """Are half of the groups through so long ago that the others are late?"""
        times, half = self.trial.late_after, -(-len(self.trial.groups) // 2)
        if times is None or len(self._ended) < half or len(self.trial.groups) < _LEAST_TO_COMPARE:
            return False
        return self.age() > max(_LEAST_LATE_SECONDS, times * self._ended[half - 1])

    def fail(self, rank: int) -> None:
        """Note that somebody in this rank's group failed."""
        self.failed.setdefault(self.trial.group_of(rank), self._clock())
