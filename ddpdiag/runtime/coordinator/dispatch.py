"""Parts of the coordinator: a dispatched trial, the open process group, budget arithmetic, and progress reports."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Raw, structs

from ddpdiag.checks.api import Stage
from ddpdiag.model import Arrival, Event, EventKind, Kind, Outcome, Status, Trial, news
from ddpdiag.model.recording import Line
from ddpdiag.model.trial import COMMUNICATOR_STEP, NO_DATA, BarrierResult
from ddpdiag.runtime.control.messages import BarrierOpen, RunTrial
from ddpdiag.runtime.deadlines import DEADLINES, HEARTBEAT_SECONDS_PER_RANK
from ddpdiag.runtime.supervisor.processes import signal_name

_REPEAT_SECONDS = 2.0
_MIN_GROUPS_TO_COMPARE = 2  # in a trial with fewer groups no group counts as late


class DispatchedTrial:
    """A trial that was sent to its ranks, with what they have reported.

    `pending_ranks` have no outcome yet, and are given up at `closes_at`. A group is identified by its index in the
    trial, because a tuple of thousands of ranks is slow to search: `group_index` holds the index of each rank's group,
    `failed_at` the time of the first failure in a group, and `stopped_groups` the groups that were told to stop.
    """

    def __init__(self, trial: Trial, patience_seconds: float, clock: Callable[[], float]) -> None:
        self.trial = trial
        self._clock = clock
        self.group_index = {rank: index for index, group in enumerate(trial.groups) for rank in group}
        self.first_rank = min(self.group_index, default=0)
        self.pending_ranks = set(self.group_index)
        self._partial_data: dict[int, Raw] = {}
        self._silent_ranks = set(self.group_index)  # ranks without partial data since all ranks had sent some
        self.failed_at: dict[int, float] = {}
        self.stopped_groups: set[int] = set()
        self._offers: dict[int, str] = {}
        self._is_exchange = False  # whether all ranks of a group get all offers
        self._missing_counts = [len(group) for group in trial.groups]  # by group: ranks not at the barrier yet
        self._run_trials: dict[int | None, RunTrial] = {}
        self._barriers: dict[int, BarrierOpen] = {}
        self._undone_counts = [len(group) for group in trial.groups]  # by group: ranks without DONE
        self.done_count = 0
        self._group_seconds: list[float] = []  # seconds that each finished group took
        self._begin = self._clock()
        self._repeated_at = self._begin
        self.closes_at = self._begin + patience_seconds

    def trial_message(self, rank: int) -> RunTrial:
        """The message with the trial for a rank. Equal messages are one object, which is encoded only once."""
        group = self.trial.groups[self.group_index[rank]]
        key = self.group_index[rank] if len(group) > 1 else None
        if key not in self._run_trials:
            self._run_trials[key] = RunTrial.for_group(group, self.trial)
        return self._run_trials[key]

    def mark_at_barrier(self, rank: int, offer: str, *, is_exchange: bool) -> tuple[int, ...]:
        """Record that a rank is at the barrier. Returns the ranks to which `barrier_message` must be sent now."""
        is_repetition = rank in self._offers
        self._offers[rank] = offer
        self._is_exchange |= is_exchange
        index = self.group_index[rank]
        self._missing_counts[index] -= not is_repetition
        if self._missing_counts[index]:
            return ()
        return (rank,) if is_repetition else self.trial.groups[index]

    def is_at_barrier(self, rank: int) -> bool:
        return rank in self._offers

    def barrier_is_open(self, rank: int) -> bool:
        return not self._missing_counts[self.group_index[rank]]

    def barrier_message(self, rank: int, arrivals: Mapping[int, Arrival]) -> BarrierOpen:
        """The message to a rank when its barrier opens. It is one object for the whole group."""
        index = self.group_index[rank]
        if index not in self._barriers:
            group = self.trial.groups[index]
            address_of = address_lookup(group, arrivals)
            exchanging = group if self._is_exchange else ()
            peers = tuple(BarrierResult(address_of(peer), self._offers[peer]) for peer in exchanging)
            self._barriers[index] = BarrierOpen(self.trial.number, address_of(group[0]), self._offers[group[0]], peers)
        return self._barriers[index]

    def repeat_is_due(self) -> bool:
        """Whether messages must be repeated now. If True, the wait for the next repetition begins."""
        is_due = self._clock() - self._repeated_at > max(_REPEAT_SECONDS, HEARTBEAT_SECONDS_PER_RANK * self.size)
        if is_due:
            self._repeated_at = self._clock()
        return is_due

    def age_seconds(self) -> float:
        return self._clock() - self._begin

    def missing_outcome(self, rank: int, status: Status, *, error: str = "", interrupted: bool = False) -> Outcome:
        """The outcome to record for a rank that sent none. `interrupted`: the end of the run ended the trial."""
        return Outcome(
            trial=self.trial.number,
            code=self.trial.code,
            rank=rank,
            status=status,
            error=error,
            interrupted=interrupted,
            partial_data=self._partial_data.get(rank, NO_DATA),
            seconds=self.age_seconds(),
        )

    def add_partial_data(self, rank: int, data: Raw) -> bool:
        """Record data that a rank has sent. Returns whether now all ranks have sent data since this was last True."""
        self._partial_data[rank] = data
        self._silent_ranks.discard(rank)
        if self._silent_ranks:
            return False
        self._silent_ranks = set(self.group_index)
        return True

    def partial_outcomes(self) -> list[Outcome]:
        """An outcome with its partial data for each rank that has none yet."""
        return [self.missing_outcome(rank, Status.SKIPPED) for rank in sorted(self.pending_ranks)]

    def mark_done(self, rank: int) -> None:
        index = self.group_index[rank]
        self.done_count += 1
        self._undone_counts[index] -= 1
        if not self._undone_counts[index]:
            self._group_seconds.append(self.age_seconds())

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return len(self.group_index)

    def awaited_ranks(self) -> set[int]:
        """Ranks for which others of their group wait at the barrier. If there are none, all pending ranks."""
        begun = {index for index, group in enumerate(self.trial.groups) if self._missing_counts[index] < len(group)}
        late = {rank for rank in self.pending_ranks if rank not in self._offers and self.group_index[rank] in begun}
        return late or set(self.pending_ranks)

    def has_late_groups(self) -> bool:
        """Whether half of the groups ended, and the rest take `late_factor` times as long. False without a factor."""
        factor, half = self.trial.late_factor, -(-len(self.trial.groups) // 2)
        if factor is None or len(self._group_seconds) < half or len(self.trial.groups) < _MIN_GROUPS_TO_COMPARE:
            return False
        return self.age_seconds() > max(DEADLINES.late_group, factor * self._group_seconds[half - 1])

    def mark_failed(self, rank: int) -> None:
        self.failed_at.setdefault(self.group_index[rank], self._clock())


def address_lookup(group: tuple[int, ...], arrivals: Mapping[int, Arrival]) -> Callable[[int], str]:
    """A function from a rank of the group to the address at which the other ranks of the group reach that rank.

    The address is the source of the rank's connection to rank 0. For ranks on rank 0's host it is the MASTER_ADDR of a
    rank on another host, because on rank 0's own host people write localhost. In a group on one host it is loopback.
    """
    first = arrivals[group[0]]
    other = next((arrivals[rank] for rank in group if arrivals[rank].host != first.host), None)

    def address_of(rank: int) -> str:
        arrival = arrivals[rank]
        remote = other if arrival.host == first.host else first  # the first rank of another host
        if remote is None:
            return "127.0.0.1"
        return remote.master_addr if arrival.host == arrivals[0].host else arrival.address

    return address_of


class OpenGroup:
    """The process group of all ranks that workers keep open, and the ranks whose workers have it.

    The next trial of all ranks with the same backend can use the group. A worker with an open group cannot open another
    one, because all its peers would have to close the first group at the same time. So a trial that needs another group
    gets new workers, also if a rank has lost the group with its worker. A worker is replaced after any outcome but
    DONE, and for other environment variables.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks_with_group: set[int] = set()
        self._backend: str | None = None
        self._variables: dict[int, Mapping[str, str | None]] = {}  # by rank

    def prepare(self, trial: Trial) -> Trial:
        """The trial to send, marked `fresh` if the open group makes new workers necessary."""
        if trial.kind is not Kind.TORCH:
            return trial
        ranks = trial.ranks
        replaced = {rank for rank in ranks if trial.fresh or self._variables.get(rank, trial.env) != trial.env}
        self._ranks_with_group -= replaced
        backend = trial.params.get("backend", "gloo")
        has_group = len(self._ranks_with_group) == self._world_size and backend == self._backend
        reuses_group = self._has_all_ranks(trial) and has_group
        if backend != "gloo" and not reuses_group and not self._ranks_with_group.isdisjoint(ranks):
            trial = structs.replace(trial, fresh=True)
            self._ranks_with_group -= set(ranks)
        self._variables |= dict.fromkeys(ranks, trial.env)
        return trial

    def record_outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Record whether the worker of this outcome's rank has opened the group, or is replaced because it failed."""
        if trial.kind is Kind.TORCH and outcome.status is not Status.DONE:
            self._ranks_with_group.discard(outcome.rank)
        elif COMMUNICATOR_STEP in outcome.timings and self._has_all_ranks(trial):
            self._ranks_with_group.add(outcome.rank)
            self._backend = str(trial.params.get("backend"))

    def _has_all_ranks(self, trial: Trial) -> bool:
        return len(trial.groups) == 1 and len(trial.groups[0]) == self._world_size


# For each check that runs last, 1.5 times its estimate is reserved, for all of them at most this share of the budget.
_RESERVE_FACTOR = 1.5
_MAX_RESERVED_SHARE = 1 / 3
# A first use that never ends must leave time for the fallback search.
_MAX_FIRST_USE_SHARE = 1 / 3


class BudgetSpent(Exception):
    """Too little of the budget is left for the next trial. Checks that run last may still use their reserved time."""


def seconds_for_last_checks(budget_seconds: float, estimates: Sequence[float]) -> float:
    """Seconds of the budget to reserve for the checks that run last. `estimates` are the seconds that each takes."""
    wanted = sum(
        _RESERVE_FACTOR * max(DEADLINES.min_trial, seconds) + DEADLINES.outcome_after_budget for seconds in estimates
    )
    return min(_MAX_RESERVED_SHARE * budget_seconds, wanted)


def reason_too_late(left_seconds: float, needed_seconds: float) -> str | None:
    """The reason to skip a check that takes longer than the time left, or None. Cut short, it would seem to hang."""
    min_seconds = max(DEADLINES.min_trial, needed_seconds)
    if left_seconds >= min_seconds:
        return None
    return f"the budget had left {max(0.0, left_seconds):.1f} s, and it takes {min_seconds:.1f} s"


def numbered_trial(
    trial: Trial, number: int, wanted_seconds: float, left_seconds: float, begin_seconds: float | None = None
) -> Trial:
    """The trial with its number, and with time limits that fit into the rest of the budget."""
    deadline = min(wanted_seconds, left_seconds)
    return structs.replace(
        trial,
        number=number,
        deadline_seconds=deadline,
        is_shortened=left_seconds < wanted_seconds,
        begin_seconds=begin_seconds,
        first_use_seconds=min(trial.first_use_seconds, left_seconds - deadline, _MAX_FIRST_USE_SHARE * left_seconds),
    )


# At least so long between reports that list ranks: the display builds a table of thousands of ranks for each.
_REPORT_SECONDS = 1.0


class ProgressReporter:
    """Reports progress to `listener`. Lists of missing or pending ranks are sent once a second at most."""

    def __init__(self, listener: news.Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._send_news = listener.tell
        self._clock = clock
        self._reported_at: float | None = None  # on `clock`; None before the first report
        self._parts_left: Counter[Stage] = Counter()
        self._reported_kinds: set[EventKind] = set()

    def _is_due(self) -> bool:
        """Whether the last list was sent a second ago or more. If True, the next second begins."""
        now = self._clock()
        if self._reported_at is not None and now - self._reported_at < _REPORT_SECONDS:
            return False
        self._reported_at = now
        return True

    def report_wait(self, joined_ranks: Collection[int], world_size: int, left_seconds: float) -> None:
        if self._is_due():
            missing = tuple(rank for rank in range(world_size) if rank not in joined_ranks)
            self._send_news(news.WaitingForRanks(joined=len(joined_ranks), missing=missing, left_seconds=left_seconds))

    def report_gathered(self, arrivals: Mapping[int, Arrival], world_size: int) -> None:
        hosts = {arrival.host for arrival in arrivals.values()}
        missing = tuple(rank for rank in range(world_size) if rank not in arrivals)
        self._send_news(news.RanksGathered(ranks=len(arrivals), hosts=len(hosts), missing=missing))

    def report_event(self, line: Line) -> None:
        """Report a signal to end or a lost rank, once for each kind, because the end of a job affects all ranks."""
        if isinstance(line, Event) and line.kind not in self._reported_kinds and (text := _event_text(line)):
            self._reported_kinds.add(line.kind)
            self._send_news(news.RunEvent(text=text))

    def set_stages(self, stages: Iterable[Stage]) -> None:
        """Set the stages that will run. A stage that runs in several parts occurs once for each part."""
        self._parts_left = Counter(stages)

    def stage_began(self, stage: Stage) -> None:
        self._parts_left[stage] -= 1
        self._send_news(news.StageBegan(name=stage.value))

    def stage_ended(self, stage: Stage, lines: Sequence[Line], seconds: float, *, budget_spent: bool) -> None:
        """Report the end of a stage or of a part of it, which wrote these lines."""
        experiments = {line.number for line in lines if isinstance(line, Trial) and line.may_fail}
        outcomes = [line for line in lines if isinstance(line, Outcome) and line.trial not in experiments]
        failed = tuple(dict.fromkeys(outcome.code for outcome in outcomes if outcome.status is not Status.DONE))
        ran = any(isinstance(line, Trial) for line in lines)
        status: news.StageStatus = "failed" if failed else "cut short" if budget_spent else "done" if ran else "skipped"
        left = self._parts_left[stage] > 0
        ended = news.StageEnded(name=stage.value, status=status, seconds=seconds, failed=failed, will_continue=left)
        self._send_news(ended)

    def trial_began(self, trial: Trial, *, importing: bool = False) -> None:
        """Report that a trial was sent. `importing`: it may have to wait for the import of torch."""
        self._reported_at = self._clock()  # nothing is shown if all ranks answer within a second
        self._send_news(news.TrialBegan(deadline_seconds=trial.limit_seconds, imports_torch=importing))

    def report_pending(self, dispatched: DispatchedTrial, arrivals: Mapping[int, Arrival]) -> None:
        if not self._is_due():
            return
        awaited_ranks = tuple(sorted(dispatched.awaited_ranks()))
        hosts = tuple(dict.fromkeys(arrivals[rank].place.host for rank in awaited_ranks if rank in arrivals))
        ranks, done = dispatched.size, dispatched.done_count
        self._send_news(news.TrialPending(ranks=ranks, done=done, awaited=awaited_ranks, hosts=hosts))


def _event_text(event: Event) -> str:
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
