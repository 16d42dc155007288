"""What rank 0 tells whoever shows the run: its own lines and counts, made into news, and not too often."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ddpdiag.checks.api import Stage
from ddpdiag.model import Arrival, Event, EventKind, Outcome, Status, Trial, news
from ddpdiag.model.recording import Line
from ddpdiag.runtime.coordinator.dispatch import DispatchedTrial
from ddpdiag.runtime.supervisor.processes import signal_name

# A table of thousands of ranks is made for each.
_SECONDS_BETWEEN = 1.0


class ProgressReporter:
    """Tells `listener` how the run goes on; what can be said at any time is told once a second."""

    def __init__(self, listener: news.Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = listener.tell
        self._clock = clock
        self._told: float | None = None  # when it told such a thing
        self._parts: Counter[Stage] = Counter()
        self._happened: set[EventKind] = set()

    def _is_due(self) -> bool:
        """Is it time to tell again? If so, the next second begins."""
        now = self._clock()
        if self._told is not None and now - self._told < _SECONDS_BETWEEN:
            return False
        self._told = now
        return True

    # Ranks -----------------------------------------------------------------------------------------------------------

    def waiting(self, came: Collection[int], world_size: int, left_seconds: float) -> None:
        """Ranks are missing."""
        if self._is_due():
            self._tell(news.Waiting(came=len(came), missing=_missing(came, world_size), left_seconds=left_seconds))

    def gathered(self, arrivals: Mapping[int, Arrival], world_size: int) -> None:
        """The wait for ranks is over."""
        hosts = {arrival.host for arrival in arrivals.values()}
        self._tell(news.Gathered(ranks=len(arrivals), hosts=len(hosts), missing=_missing(arrivals, world_size)))

    def saw_line(self, line: Line) -> None:
        """The first of each kind of what changes the run: a job's end takes all ranks with it."""
        if isinstance(line, Event) and line.kind not in self._happened and (text := _happened(line)):
            self._happened.add(line.kind)
            self._tell(news.Happened(text=text))

    # Stages and checks -----------------------------------------------------------------------------------------------

    def planned(self, stages: Iterable[Stage]) -> None:
        """These stages will run, each once for every time that it is named."""
        self._parts = Counter(stages)

    def stage_began(self, stage: Stage) -> None:
        """A part of a stage begins."""
        self._parts[stage] -= 1
        self._tell(news.StageBegan(name=stage.value))

    def stage_ended(self, stage: Stage, lines: Sequence[Line], seconds: float, *, cut: bool) -> None:
        """A part of a stage is over, in which these lines were written; `cut` says that the budget was spent."""
        experiments = {line.number for line in lines if isinstance(line, Trial) and line.may_fail}
        outcomes = [line for line in lines if isinstance(line, Outcome) and line.trial not in experiments]
        failed = tuple(dict.fromkeys(outcome.code for outcome in outcomes if outcome.status is not Status.DONE))
        ran = any(isinstance(line, Trial) for line in lines)
        status: news.StageStatus = "failed" if failed else "cut short" if cut else "done" if ran else "skipped"
        more = self._parts[stage] > 0
        self._tell(news.StageEnded(name=stage.value, status=status, seconds=seconds, failed=failed, more=more))

    # Trials ----------------------------------------------------------------------------------------------------------

    def trial_began(self, trial: Trial, *, importing: bool = False) -> None:
        """A trial was handed out, which may have to wait for torch."""
        self._told = self._clock()  # who answers within a second is not worth a word
        self._tell(news.TrialBegan(deadline_seconds=trial.limit_seconds, importing=importing))

    def pending(self, dispatched: DispatchedTrial, arrivals: Mapping[int, Arrival]) -> None:
        """Ranks have not answered yet."""
        if not self._is_due():
            return
        awaited = tuple(sorted(dispatched.awaited()))
        nodes = tuple(dict.fromkeys(arrivals[rank].place.node for rank in awaited if rank in arrivals))
        self._tell(news.Pending(ranks=dispatched.size, done=dispatched.ranks_done, awaited=awaited, nodes=nodes))


def _missing(came: Collection[int], world_size: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world_size) if rank not in came)


def _happened(event: Event) -> str:
    match event.kind:
        case EventKind.SIGNAL:
            return f"told to end by {signal_name(int(event.detail))}"
        case EventKind.LEAVING:
            return f"rank {event.rank} is told to leave by {signal_name(int(event.detail))}: the run ends"
        case EventKind.LOST:
            where = f" on {event.node}" if event.node else ""
            return f"rank {event.rank}{where} is lost: {event.detail}"
        case _:
            return ""
