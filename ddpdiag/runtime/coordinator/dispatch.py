"""A trial from its dispatch to its last outcome, the time that is kept of the budget, and the progress reports."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Raw, structs

from ddpdiag.checks.api import Stage
from ddpdiag.model import Arrival, Event, EventKind, Kind, Outcome, Status, Trial, news
from ddpdiag.model.recording import Line
from ddpdiag.model.trial import COMMUNICATOR_STEP, NOTHING, Opening
from ddpdiag.runtime.control.messages import BarrierOpen, RunTrial
from ddpdiag.runtime.deadlines import BEAT_PER_RANK, DEADLINES
from ddpdiag.runtime.supervisor.processes import signal_name

_REPEAT_SECONDS = 2.0
_LEAST_TO_COMPARE = 2  # number of groups; with fewer no group counts as late


class DispatchedTrial:
    """A trial that was sent: its ranks without an outcome, its ranks at the barrier, and when its groups failed.

    A group is known by its index in the trial: it may hold thousands of ranks, and to search a tuple is slow.
    """

    def __init__(self, trial: Trial, patience_seconds: float, clock: Callable[[], float]) -> None:
        self.trial = trial
        self._clock = clock
        self._index = {rank: index for index, group in enumerate(trial.groups) for rank in group}
        self.first = min(self._index, default=0)
        self.pending = set(self._index)
        self.partial: dict[int, Raw] = {}
        self.failed: dict[int, float] = {}
        self.stopped: set[int] = set()
        self._offers: dict[int, str] = {}
        self._shares = False  # whether all ranks get all offers
        self._missing = [len(group) for group in trial.groups]  # ranks of each group that have not reached the barrier
        self._run_trials: dict[int | None, RunTrial] = {}
        self._barriers: dict[int, BarrierOpen] = {}
        self._open = [len(group) for group in trial.groups]  # ranks of each group that have not done their part
        self.ranks_done = 0
        self._ended: list[float] = []  # age of the trial when each group was done
        self._begin = self._clock()
        self._repeated = self._begin
        self.latest = self._begin + patience_seconds

    def run_trial(self, rank: int) -> RunTrial:
        """The message with the trial for a rank: one object for a whole group, and one for all lone ranks."""
        group = self.trial.groups[self._index[rank]]
        key = self._index[rank] if len(group) > 1 else None
        if key not in self._run_trials:
            self._run_trials[key] = RunTrial.to(group, self.trial)
        return self._run_trials[key]

    def reached_barrier(self, rank: int, offer: str, *, shares: bool) -> tuple[int, ...]:
        """Note that a rank is at the barrier; return the ranks to which `barrier_open` must be sent now."""
        again = rank in self._offers
        self._offers[rank] = offer
        self._shares |= shares
        index = self._index[rank]
        self._missing[index] -= not again
        if self._missing[index]:
            return ()
        return (rank,) if again else self.trial.groups[index]

    def is_at_barrier(self, rank: int) -> bool:
        return rank in self._offers

    def barrier_is_open(self, rank: int) -> bool:
        """Whether the whole group of this rank has reached the barrier."""
        return not self._missing[self._index[rank]]

    def barrier_open(self, rank: int, arrivals: Mapping[int, Arrival]) -> BarrierOpen:
        """The message to a rank when the barrier opens: one object for its whole group."""
        index = self._index[rank]
        if index not in self._barriers:
            group = self.trial.groups[index]
            reached_at = addresses(group, arrivals)
            first = group[0]
            peers = tuple(Opening(reached_at(peer), self._offers[peer]) for peer in (group if self._shares else ()))
            self._barriers[index] = BarrierOpen(self.trial.number, reached_at(first), self._offers[first], peers)
        return self._barriers[index]

    def repeat_is_due(self) -> bool:
        """Whether to repeat messages that may have been lost; if so, the wait until the next repetition begins."""
        due = self._clock() - self._repeated > max(_REPEAT_SECONDS, BEAT_PER_RANK * self.size)
        if due:
            self._repeated = self._clock()
        return due

    def age(self) -> float:
        """Seconds since the dispatch."""
        return self._clock() - self._begin

    def missing_outcome(self, rank: int, status: Status, *, error: str = "", told: bool = False) -> Outcome:
        """The outcome to record for a rank that sent none."""
        return Outcome(
            trial=self.trial.number,
            code=self.trial.code,
            rank=rank,
            status=status,
            error=error,
            told=told,
            so_far=self.partial.get(rank, NOTHING),
            seconds=self.age(),
        )

    def done(self, rank: int) -> None:
        """Note that a rank has done its part."""
        index = self._index[rank]
        self.ranks_done += 1
        self._open[index] -= 1
        if not self._open[index]:
            self._ended.append(self.age())

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return len(self._index)

    def awaited(self) -> set[int]:
        """Ranks that keep peers waiting at the barrier; if no rank is at one, all ranks without an outcome."""
        begun = {index for index, group in enumerate(self.trial.groups) if self._missing[index] < len(group)}
        late = {rank for rank in self.pending if rank not in self._offers and self._index[rank] in begun}
        return late or set(self.pending)

    def index_of(self, rank: int) -> int:
        return self._index[rank]

    def late(self) -> bool:
        """Whether half of the groups ended so long ago that the other groups count as late."""
        times, half = self.trial.late_after, -(-len(self.trial.groups) // 2)
        if times is None or len(self._ended) < half or len(self.trial.groups) < _LEAST_TO_COMPARE:
            return False
        return self.age() > max(DEADLINES.late_group, times * self._ended[half - 1])

    def fail(self, rank: int) -> None:
        """Note that a rank failed, and with it its group."""
        self.failed.setdefault(self._index[rank], self._clock())


def addresses(group: tuple[int, ...], arrivals: Mapping[int, Arrival]) -> Callable[[int], str]:
    """`reached_at(rank)`: the address of a rank towards rank 0, at which its group reaches it.

    For ranks on rank 0's host it is MASTER_ADDR of a rank on another host: on the host itself people write localhost.
    """
    first = arrivals[group[0]]
    other = next((arrivals[rank] for rank in group if arrivals[rank].host != first.host), None)

    def reached_at(rank: int) -> str:
        arrival = arrivals[rank]
        remote = other if arrival.host == first.host else first  # the first rank of another host
        if remote is None:
            return "127.0.0.1"
        return remote.coordinator if arrival.host == arrivals[0].host else arrival.address

    return reached_at


class KeptGroup:
    """The ranks whose worker keeps a process group of all ranks open for the next trial of all ranks.

    A worker with an open group cannot open another: to close the first, its peers would have to close theirs as well.
    So the workers of a trial that needs another group are new ones, as are all if some rank has no group any more. A
    rank loses it with its worker, which is replaced after any outcome but done, and for other variables.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._holders: set[int] = set()
        self._backend: str | None = None
        self._variables: dict[int, Mapping[str, str | None]] = {}  # by rank

    def prepared(self, trial: Trial) -> Trial:
        """The trial to send: marked `fresh` if the open group makes new workers necessary."""
        if trial.kind is not Kind.TORCH:
            return trial
        ranks = trial.ranks
        replaced = {rank for rank in ranks if trial.fresh or self._variables.get(rank, trial.env) != trial.env}
        self._holders -= replaced
        backend = trial.params.get("backend", "gloo")
        shares = self._is_whole(trial) and len(self._holders) == self._world_size and backend == self._backend
        if backend != "gloo" and not shares and not self._holders.isdisjoint(ranks):
            trial = structs.replace(trial, fresh=True)
            self._holders.difference_update(ranks)
        self._variables |= dict.fromkeys(ranks, trial.env)
        return trial

    def ended(self, trial: Trial, outcome: Outcome) -> None:
        """Note from an outcome whether the rank's worker has opened the group, or is replaced because it failed."""
        if trial.kind is Kind.TORCH and outcome.status is not Status.DONE:
            self._holders.discard(outcome.rank)
        elif COMMUNICATOR_STEP in outcome.timings and self._is_whole(trial):
            self._holders.add(outcome.rank)
            self._backend = str(trial.params.get("backend"))

    def _is_whole(self, trial: Trial) -> bool:
        return len(trial.groups) == 1 and len(trial.groups[0]) == self._world_size


# For each check that runs last 1.5 times its estimate is kept, for all of them at most this share of the budget.
_KEPT_TIMES = 1.5
_KEPT_SHARE = 1 / 3
# A first use that never ends must leave time for trials that search for variables as a remedy.
_FIRST_USE_SHARE = 1 / 3


class BudgetSpent(Exception):
    """Too little of the budget is left for the next trial; checks that run last have kept time and may still run."""


def kept_seconds(budget_seconds: float, takes: Sequence[float]) -> float:
    """Seconds of the budget that are kept for checks that run last, given the seconds that each takes."""
    wanted = sum(_KEPT_TIMES * max(DEADLINES.least_trial, seconds) + DEADLINES.cut_short for seconds in takes)
    return min(_KEPT_SHARE * budget_seconds, wanted)


def too_late(left_seconds: float, takes_seconds: float) -> str | None:
    """The reason to skip a check that takes longer than what is left, or None: cut short, it would look like a hang."""
    least = max(DEADLINES.least_trial, takes_seconds)
    if left_seconds >= least:
        return None
    return f"the budget had left {max(0.0, left_seconds):.1f} s, and it takes {least:.1f} s"


def with_number(
    trial: Trial, number: int, wanted_seconds: float, left_seconds: float, begin_seconds: float | None = None
) -> Trial:
    """The trial to send: with its number, and with times that fit into what is left of the budget."""
    hurried = left_seconds < wanted_seconds
    deadline = min(wanted_seconds, left_seconds)
    return structs.replace(
        trial,
        number=number,
        deadline_seconds=deadline,
        hurried=hurried,
        begin_seconds=begin_seconds,
        first_use_seconds=min(trial.first_use_seconds, left_seconds - deadline, _FIRST_USE_SHARE * left_seconds),
    )


# The display builds a table of thousands of ranks for each report.
_SECONDS_BETWEEN = 1.0


class ProgressReporter:
    """Reports progress to `listener`; the lists of waiting and pending ranks once a second at most."""

    def __init__(self, listener: news.Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = listener.tell
        self._clock = clock
        self._reported: float | None = None  # on `clock`; None before the first report
        self._parts: Counter[Stage] = Counter()
        self._happened: set[EventKind] = set()

    def _is_due(self) -> bool:
        """Whether the last report was a second ago or more; if so, the next second begins now."""
        now = self._clock()
        if self._reported is not None and now - self._reported < _SECONDS_BETWEEN:
            return False
        self._reported = now
        return True

    def waiting(self, came: Collection[int], world_size: int, left_seconds: float) -> None:
        """Report which ranks have not joined yet."""
        if self._is_due():
            self._tell(news.Waiting(came=len(came), missing=_missing(came, world_size), left_seconds=left_seconds))

    def gathered(self, arrivals: Mapping[int, Arrival], world_size: int) -> None:
        """Report that the wait for ranks is over."""
        hosts = {arrival.host for arrival in arrivals.values()}
        self._tell(news.Gathered(ranks=len(arrivals), hosts=len(hosts), missing=_missing(arrivals, world_size)))

    def saw_line(self, line: Line) -> None:
        """Report a signal to end or a lost rank, once of each kind: the end of a job affects all ranks."""
        if isinstance(line, Event) and line.kind not in self._happened and (text := _happened(line)):
            self._happened.add(line.kind)
            self._tell(news.Happened(text=text))

    def planned(self, stages: Iterable[Stage]) -> None:
        """Set the stages that will run; a stage with several parts is named once for each part."""
        self._parts = Counter(stages)

    def stage_began(self, stage: Stage) -> None:
        self._parts[stage] -= 1
        self._tell(news.StageBegan(name=stage.value))

    def stage_ended(self, stage: Stage, lines: Sequence[Line], seconds: float, *, cut: bool) -> None:
        """Report that a part of a stage is over, in which these lines were written; `cut`: the budget was spent."""
        experiments = {line.number for line in lines if isinstance(line, Trial) and line.may_fail}
        outcomes = [line for line in lines if isinstance(line, Outcome) and line.trial not in experiments]
        failed = tuple(dict.fromkeys(outcome.code for outcome in outcomes if outcome.status is not Status.DONE))
        ran = any(isinstance(line, Trial) for line in lines)
        status: news.StageStatus = "failed" if failed else "cut short" if cut else "done" if ran else "skipped"
        more = self._parts[stage] > 0
        self._tell(news.StageEnded(name=stage.value, status=status, seconds=seconds, failed=failed, more=more))

    def trial_began(self, trial: Trial, *, importing: bool = False) -> None:
        """Report that a trial was sent; `importing`: it may have to wait for the import of torch."""
        self._reported = self._clock()  # nothing is shown if all ranks answer within a second
        self._tell(news.TrialBegan(deadline_seconds=trial.limit_seconds, importing=importing))

    def pending(self, dispatched: DispatchedTrial, arrivals: Mapping[int, Arrival]) -> None:
        """Report which ranks have not answered yet."""
        if not self._is_due():
            return
        awaited = tuple(sorted(dispatched.awaited()))
        nodes = tuple(dict.fromkeys(arrivals[rank].place.host for rank in awaited if rank in arrivals))
        self._tell(news.Pending(ranks=dispatched.size, done=dispatched.ranks_done, awaited=awaited, hosts=nodes))


def _missing(came: Collection[int], world_size: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world_size) if rank not in came)


def _happened(event: Event) -> str:
    match event.kind:
        case EventKind.SIGNAL:
            return f"received {signal_name(int(event.detail))}: the run ends"
        case EventKind.LEAVING:
            return f"rank {event.rank} received {signal_name(int(event.detail))}: the run ends"
        case EventKind.LOST:
            where = f" on {event.host}" if event.host else ""
            return f"rank {event.rank}{where} is lost: {event.detail}"
        case _:
            return ""
