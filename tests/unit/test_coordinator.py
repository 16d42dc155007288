"""The coordinator against a stand-in for the control server, whose ranks follow a script. No process, no socket."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest
from msgspec import Raw, structs
from seen import arrival_of, made_check

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage, blocked, inapplicable, new_trial
from ddpdiag.model import EventKind, Header, Kind, Outcome, Recording, RunOptions, Status, Trial
from ddpdiag.model.news import (
    CheckBegan,
    CheckProgress,
    News,
    PartialResults,
    RanksGathered,
    RunEvent,
    RunStarted,
    StageBegan,
    StageEnded,
    TrialBegan,
    TrialPending,
    WaitingForRanks,
)
from ddpdiag.runtime.control import messages
from ddpdiag.runtime.control.membership import Patience
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.coordinator.dispatch import DispatchedTrial, ProgressReporter

Answer = Callable[[int, messages.MessageToRank], list[messages.MessageToRank0]]
N = TypeVar("N", bound=News)


def check(code: str = "COL001", scope: Scope = Scope.WORLD, kind: Kind = Kind.PLAIN, **more: object) -> Check[Nothing]:
    return made_check(code, scope, kind, stage=Stage.COLLECTIVE, measure=lambda ctx: Nothing(), **more)


def outcome(rank: int, trial: Trial, status: Status = Status.DONE, **more: object) -> Outcome:
    return Outcome(trial=trial.number, code=trial.code, rank=rank, status=status, **more)  # type: ignore[arg-type]


def obedient(rank: int, message: messages.MessageToRank) -> list[messages.MessageToRank0]:
    match message:
        case messages.RunTrial(trial):
            return [outcome(rank, trial, data=Raw(b"{}"))]
        case messages.Ping():
            return [messages.Pong()]
        case _:
            return []


def raises(rank: int, message: messages.MessageToRank) -> list[messages.MessageToRank0]:
    return (
        [outcome(rank, message.trial, Status.RAISED)] if isinstance(message, messages.RunTrial) else [messages.Pong()]
    )


def gated(rank: int, message: messages.MessageToRank, *, shares: bool = False) -> list[messages.MessageToRank0]:
    match message:
        case messages.RunTrial(trial):
            return [messages.BarrierReached(trial.number, f"port of {rank}", shares)]
        case messages.BarrierOpen():
            return [Outcome(trial=message.trial, code="COL001", rank=rank, status=Status.DONE)]
        case _:
            return [messages.Pong()]


def stopped(
    rank: int,
    message: messages.MessageToRank,
    *,
    silent: int,
    begins: Callable[[int, Trial], list[messages.MessageToRank0]] = lambda rank, trial: [],
) -> list[messages.MessageToRank0]:
    """A rank that hangs until it is stopped; rank `silent` answers no ping."""
    match message:
        case messages.RunTrial(trial):
            return begins(rank, trial)
        case messages.Stop(number):
            return [Outcome(trial=number, code="COL001", rank=rank, status=Status.HUNG, interrupted=True)]
        case _:
            return [messages.Pong()] if rank != silent else []


@dataclass
class StandIn:
    """A control server whose ranks answer at once, as `answer` says. The first messages are their hellos."""

    size: int
    answer: Answer = obedient
    missing: frozenset[int] = frozenset()
    sent: list[tuple[int, messages.MessageToRank]] = field(default_factory=list)
    waiting: list[tuple[bytes, messages.MessageToRank0]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = [rank for rank in range(self.size) if rank not in self.missing]
        self.waiting = [(b"%d" % rank, messages.Hello(arrival_of(rank, self.size))) for rank in ranks]

    def send(self, identity: bytes, message: messages.MessageToRank) -> None:
        if isinstance(message, messages.Refused):
            self.refused.append(message.sentence)
            return
        rank = int(identity)
        self.sent.append((rank, message))
        self.waiting += [(identity, reply) for reply in self.answer(rank, message)]

    def receive(self, seconds: float) -> Iterator[tuple[bytes, messages.MessageToRank0]]:
        now, self.waiting = self.waiting, []
        yield from now

    def close(self) -> None:
        pass


class Quiet:
    def __init__(self) -> None:
        self.news: list[News] = []

    def tell(self, news: News) -> None:
        self.news.append(news)

    def of(self, kind: type[N]) -> list[N]:
        return [news for news in self.news if isinstance(news, kind)]

    def close(self) -> None: ...


# Silences are short here: the ranks of a stand-in answer at once or never.
HURRY = Patience(heartbeat=0.005, silence=0.05, grace=0.01, wind_down=0.05)


def coordinator_of(
    server: StandIn,
    *checks: Check[Nothing],
    signal: int | None = None,
    options: RunOptions | None = None,
    listener: Quiet | None = None,
) -> Coordinator:
    header = Header(
        run_id="r", world_size=server.size, launcher="hand", options=options or RunOptions(), created="", version="0"
    )
    return Coordinator(server, header, checks, listener or Quiet(), lambda: signal, HURRY)  # type: ignore[arg-type]


def conduct(server: StandIn, *checks: Check[Nothing], **more: object) -> Recording:
    return coordinator_of(server, *checks, **more).run(0.05)  # type: ignore[arg-type]


def codes(recording: Recording) -> list[str]:
    return [trial.code for trial in recording.trials]


def statuses(recording: Recording) -> list[Status]:
    return [o.status for o in recording.outcomes]


def test_every_rank_gets_its_place_and_its_orders() -> None:
    server = StandIn(3)
    recording = conduct(server, check())
    assert [rank for rank, message in server.sent if isinstance(message, messages.Start)] == [0, 1, 2]
    assert statuses(recording) == [Status.DONE] * 3
    assert recording.end is not None


def test_the_recording_tells_when_each_trial_was_handed_out() -> None:
    run = conduct(StandIn(2), check(), check("COL003"))
    begins = [trial.begin_seconds for trial in run.trials]
    assert None not in begins
    assert begins == sorted(begins)
    assert run.end is not None
    assert begins[-1] <= run.end.seconds


@pytest.mark.parametrize(("shares", "peers"), [(True, ["port of 0", "port of 1"]), (False, [])], ids=["shared", "not"])
def test_the_barrier_opens_for_all_with_the_first_offer(shares: bool, peers: list[str]) -> None:
    server = StandIn(2, partial(gated, shares=shares))
    conduct(server, check())
    openings = [message for _, message in server.sent if isinstance(message, messages.BarrierOpen)]
    assert [(opening.offer, opening.host) for opening in openings] == [("port of 0", "127.0.0.1")] * 2
    assert [[offer for _, offer in opening.peers] for opening in openings] == [peers] * 2


def test_a_missing_rank_is_noted_and_checks_of_the_world_are_left_out(golden) -> None:
    recording = conduct(StandIn(3, missing=frozenset({1})), check("HST001", Scope.RANK), check())
    assert [(e.kind, e.rank) for e in recording.events] == [(EventKind.ABSENT, 1)]
    assert [o.rank for o in recording.outcomes] == [0, 2]
    (skip,) = recording.skips
    assert (skip.code, skip.is_inapplicable) == ("COL001", False)
    golden(skip.reason)


def test_a_silent_rank_is_lost_and_its_peers_are_stopped_and_its_part_is_kept() -> None:
    def begins(rank: int, trial: Trial) -> list[messages.MessageToRank0]:
        return [messages.PartialData(trial.number, Raw(b"1"))] if rank == 2 else []

    recording = conduct(StandIn(3, partial(stopped, silent=2, begins=begins)), check())
    assert [(e.kind, e.rank) for e in recording.events] == [(EventKind.LOST, 2)]
    assert statuses(recording) == [Status.HUNG, Status.HUNG, Status.UNHEARD]
    assert [bytes(o.partial_data) for o in recording.outcomes] == [b"null", b"null", b"1"]


def test_a_rank_that_did_not_receive_that_its_part_is_over_is_told_again(monkeypatch) -> None:
    monkeypatch.setattr("ddpdiag.runtime.coordinator.dispatch._REPEAT_SECONDS", 0.01)
    stops: list[int] = []

    def hears_the_second(rank: int, message: messages.MessageToRank) -> list[messages.MessageToRank0]:
        match message:
            case messages.RunTrial() if rank == 1:
                return raises(rank, message)
            case messages.Stop(number) if rank == 0:
                stops.append(number)
                told = Outcome(trial=number, code="COL001", rank=0, status=Status.HUNG, interrupted=True)
                return [told] if len(stops) > 1 else []
            case messages.RunTrial():
                return []
            case _:
                return [messages.Pong()]

    assert statuses(conduct(StandIn(2, hears_the_second), check())) == [Status.HUNG, Status.RAISED]


def test_what_was_handed_over_is_kept_when_the_run_ends_in_the_middle() -> None:
    def cut_short(rank: int, message: messages.MessageToRank) -> list[messages.MessageToRank0]:
        match message:
            case messages.RunTrial(trial):
                return [
                    messages.PartialData(trial.number, Raw(b"1"), "one"),
                    messages.PartialData(trial.number, Raw(b"[2]"), "two"),
                ]
            case messages.Ping():
                return [messages.Leaving(2)]
            case _:
                return []

    listener = Quiet()
    recording = conduct(StandIn(2, cut_short), check(), listener=listener)
    assert [bytes(o.partial_data) for o in recording.outcomes] == [b"[2]"] * 2
    assert [news.text for news in listener.of(CheckProgress)] == ["one", "two"]
    # Only when both had reported: the first rank twice, the second once.
    (partial,) = listener.of(PartialResults)
    assert [bytes(o.partial_data) for o in partial.recording.outcomes] == [b"[2]", b"1"]


def test_a_failure_does_not_stop_ranks_of_other_groups() -> None:
    server = StandIn(3, lambda rank, message: (raises if rank == 1 else obedient)(rank, message))
    assert statuses(conduct(server, check("HST001", Scope.RANK))) == [Status.DONE, Status.RAISED, Status.DONE]
    assert not any(isinstance(message, messages.Stop) for _, message in server.sent)


def test_a_rank_without_torch_takes_no_further_part() -> None:
    def no_torch(rank: int, message: messages.MessageToRank) -> list[messages.MessageToRank0]:
        match message:
            case messages.RunTrial(trial) if rank == 1:
                return [outcome(rank, trial, Status.HUNG, last_step="import torch")]
            case _:
                return obedient(rank, message)

    recording = conduct(StandIn(2, no_torch), check("LCH003", Scope.RANK), check("COL001", kind=Kind.TORCH))
    assert [skip.code for skip in recording.skips] == ["COL001"]


def test_plain_checks_run_before_those_that_wait_for_torch() -> None:
    recording = conduct(StandIn(1), check("LCH003", Scope.RANK, Kind.TORCH), check("HST001", Scope.RANK))
    assert codes(recording) == ["HST001", "LCH003"]


def test_a_blocked_check_is_left_out() -> None:
    first = check("COL001")
    recording = conduct(StandIn(2, raises), first, check("TRN001", skip=lambda s: blocked(s.of(first).failure_text)))
    assert [skip.code for skip in recording.skips] == ["TRN001"]


def test_missing_ground_is_an_excuse_unless_the_check_was_asked_for() -> None:
    groundless = check("GPU002", skip=lambda seen: inapplicable("no GPU"))
    assert conduct(StandIn(1), groundless).skips[0].is_inapplicable
    assert not conduct(StandIn(1), groundless, options=RunOptions(select=("GPU002",))).skips[0].is_inapplicable


def test_a_rank_below_0_is_refused_and_nothing_is_noted_of_it() -> None:
    server = StandIn(2)
    server.waiting.insert(0, (b"-1", messages.Hello(arrival_of(-1, 2, ranks_per_node=1))))
    recording = conduct(server, check())
    assert len(server.refused) == 1
    assert (recording.events, len(recording.outcomes)) == ((), 2)


def test_a_second_process_with_a_rank_is_refused_and_noted(golden) -> None:
    twin = structs.replace(arrival_of(1, 2), pid=99, nonce="another")
    server = StandIn(2)
    server.waiting = [server.waiting[0], (b"1", messages.Hello(arrival_of(1, 2))), (b"9", messages.Hello(twin))]
    recording = conduct(server, check())
    assert [(e.kind, e.rank) for e in recording.events] == [(EventKind.DUPLICATE, 1)]
    golden(*server.refused)


def test_ranks_that_got_a_signal_are_witnesses_and_the_silent_one_is_lost() -> None:
    def begins(rank: int, trial: Trial) -> list[messages.MessageToRank0]:
        return [messages.Leaving(15)] if rank != 2 else []

    recording = conduct(StandIn(3, partial(stopped, silent=2, begins=begins)), check())
    kinds = {(e.kind, e.rank) for e in recording.events}
    assert kinds == {(EventKind.LEAVING, 0), (EventKind.LEAVING, 1), (EventKind.LOST, 2)}
    assert statuses(recording) == [Status.SKIPPED, Status.SKIPPED, Status.UNHEARD]


def test_a_signal_after_the_last_trial_is_told_apart() -> None:
    server = StandIn(2)
    coordinator = coordinator_of(server, check())
    assert coordinator.run(0.05).events == ()
    assert coordinator.late_signal() is None
    server.waiting.append((b"1", messages.Leaving(15)))
    coordinator.membership.send_heartbeats()
    assert coordinator.late_signal() == 15


def test_a_signal_in_the_middle_of_a_run_is_in_its_recording_and_no_late_one() -> None:
    coordinator = coordinator_of(StandIn(2), check(), signal=2)
    recording = coordinator.run(0.05)
    assert [event.kind for event in recording.events] == [EventKind.SIGNAL]
    assert recording.end is not None
    assert coordinator.late_signal() is None


def test_a_rank_that_comes_when_the_run_was_told_to_end_learns_that_as_its_exit_code() -> None:
    server = StandIn(2, missing=frozenset({1}))
    exit_codes = []
    coordinator = coordinator_of(server, check(), signal=15)
    coordinator.run(0.05)
    server.send = lambda _identity, message: exit_codes.append(message.exit_code)  # type: ignore[method-assign]
    server.waiting.append((b"1", messages.Hello(arrival_of(1, 2))))
    coordinator.membership.send_heartbeats()
    assert exit_codes == [143]


def test_a_spent_budget_ends_the_run() -> None:
    recording = conduct(StandIn(2), check(), options=RunOptions(budget_seconds=3.5))
    assert [event.kind for event in recording.events] == [EventKind.BUDGET]


def test_a_plan_sees_what_came_of_its_trials_before() -> None:
    def thrice(seen: Seen[Nothing]) -> tuple[Trial, ...]:
        return (new_trial(seen, params={"n": len(seen.rows)}),) if len(seen.trials) < 3 else ()

    recording = conduct(StandIn(2), check(plan=thrice))
    assert [trial.params["n"] for trial in recording.trials] == [0, 2, 4]
    assert [trial.number for trial in recording.trials] == [1, 2, 3]


def last(code: str = "GPU010", takes: float = 0.1, **more: object) -> Check[Nothing]:
    def plan(seen: Seen[Nothing]) -> tuple[Trial, ...]:
        return (new_trial(seen),) if seen.is_last and not seen.trials else ()

    return check(code, last_seconds=lambda seen: takes, **{"plan": plan, **more})


def looks_twice(**more: object) -> Check[Nothing]:
    """Once in its stage, and once at the end."""

    def plan(seen: Seen[Nothing]) -> tuple[Trial, ...]:
        return (new_trial(seen),) if len(seen.trials) == seen.is_last else ()

    return last("COL000", plan=plan, **more)


LAST = {
    "they run when the others have no time": (5.0, [last(), check()], ["GPU010"]),
    "before the others and after them": (
        60.0,
        [looks_twice(), check(), last()],
        ["COL000", "COL001", "COL000", "GPU010"],
    ),
    "time for the second look": (5.0, [looks_twice(), check()], ["COL000", "COL000"]),
    "one that looks twice is left out once": (
        60.0,
        [looks_twice(skip=lambda seen: inapplicable("one host")), check()],
        ["COL001"],
    ),
    "no trial takes no time": (5.0, [check(), last(plan=lambda seen: ())], ["COL001"]),
    "one left out takes no time": (5.0, [check(), last(skip=lambda seen: inapplicable("no GPU"))], ["COL001"]),
    "left out rather than cut short": (5.0, [last(takes=2.1)], []),
}


@pytest.mark.parametrize(("budget", "checks", "run"), LAST.values(), ids=LAST)
def test_time_is_kept_for_checks_that_run_last(golden, budget: float, checks: list, run: list[str]) -> None:
    # Of a budget, 3 s are for the end of the run.
    recording = conduct(StandIn(2), *checks, options=RunOptions(budget_seconds=budget))
    assert codes(recording) == run
    golden(*(f"{event.kind.value}: {event.detail}" for event in recording.events))
    golden(*(f"{skip.code} {skip.is_inapplicable}: {skip.reason}" for skip in recording.skips))


def test_others_have_so_much_less_time() -> None:
    (cut, _) = conduct(StandIn(2), check(), last(takes=2.0), options=RunOptions(budget_seconds=11.0)).trials
    assert cut.is_shortened
    assert 4.0 < cut.deadline_seconds < 4.4  # of 5.3


def test_of_two_that_run_last_the_first_leaves_time_for_the_second() -> None:
    first, second = conduct(StandIn(2), last(), last("GPU011"), options=RunOptions(budget_seconds=9.0)).trials
    assert first.deadline_seconds < 3.1
    assert second.deadline_seconds > 5.0


def test_a_run_that_gets_a_signal_does_not_wait_for_them() -> None:
    def told(rank: int, message: messages.MessageToRank) -> list[messages.MessageToRank0]:
        return [messages.Leaving(2)] if isinstance(message, messages.RunTrial) else [messages.Pong()]

    recording = conduct(StandIn(2, told), check(), last())
    assert codes(recording) == ["COL001"]
    assert not recording.skips


def told(server: StandIn, *checks: Check[Nothing], signal: int | None = None) -> Quiet:
    listener = Quiet()
    conduct(server, *checks, signal=signal, listener=listener)
    return listener


def test_the_run_tells_its_course_in_order() -> None:
    listener = told(StandIn(2), check())
    kinds = [type(news) for news in listener.news if not isinstance(news, WaitingForRanks)]
    assert kinds == [RunStarted, RanksGathered, StageBegan, CheckBegan, TrialBegan, StageEnded]
    assert listener.of(RanksGathered) == [RanksGathered(ranks=2, hosts=1, missing=())]


def test_who_is_waited_for_is_told() -> None:
    listener = told(StandIn(3, missing=frozenset({1})), check())
    assert all(1 in news.missing for news in listener.of(WaitingForRanks))
    assert listener.of(RanksGathered)[0].missing == (1,)


STAGES = {
    "nothing ran": (StandIn(3, missing=frozenset({1})), [check()], [("skipped", (), False)]),
    "a trial failed": (StandIn(2, raises), [check()], [("failed", ("COL001",), False)]),
    "with and without torch": (
        StandIn(2),
        [check(), check("COL003", kind=Kind.TORCH)],
        [("done", (), True), ("done", (), False)],
    ),
    "before a second look": (
        StandIn(2),
        [looks_twice(), check("COL003", kind=Kind.TORCH)],
        [("done", (), True), ("done", (), False), ("done", (), False)],
    ),
}


@pytest.mark.parametrize(("server", "checks", "ends"), STAGES.values(), ids=STAGES)
def test_the_end_of_a_stage_names_the_checks_that_failed(server: StandIn, checks: list, ends: list) -> None:
    ended = told(server, *checks).of(StageEnded)
    assert [(e.name, e.status, e.failed, e.will_continue) for e in ended] == [("collective", *end) for end in ends]


def test_a_signal_is_told_and_the_interrupted_stage_has_no_end(golden) -> None:
    listener = told(StandIn(2), check(), signal=2)
    golden(*(news.text for news in listener.of(RunEvent)))
    assert listener.of(StageEnded) == []


def test_pending_ranks_are_told_once_a_second_and_those_who_are_not_at_the_barrier_are_awaited() -> None:
    now = [0.0]
    trial = Trial(code="COL001", groups=((0, 1, 2),), kind=Kind.PLAIN, deadline_seconds=5.0, number=1)
    dispatched = DispatchedTrial(trial, 9.0, lambda: now[0])
    listener = Quiet()
    telling = ProgressReporter(listener, lambda: now[0])
    arrivals = {rank: arrival_of(rank, 3, ranks_per_node=1) for rank in range(3)}
    telling.trial_began(trial)
    now[0] = 0.9
    telling.trial_began(trial)  # a second begins anew
    now[0] = 1.0
    telling.report_pending(dispatched, arrivals)
    assert listener.of(TrialPending) == []
    for seconds in (2.0, 2.5):
        now[0] = seconds
        telling.report_pending(dispatched, arrivals)
    dispatched.mark_at_barrier(0, "", is_exchange=False)
    dispatched.mark_at_barrier(1, "", is_exchange=False)
    now[0] = 3.0
    telling.report_pending(dispatched, arrivals)
    dispatched.pending_ranks -= {0, 2}
    dispatched.mark_done(0)
    dispatched.mark_failed(2)  # it has ended, and not done its part
    now[0] = 4.0
    telling.report_pending(dispatched, arrivals)
    assert [(p.done, p.ranks, p.awaited, p.hosts) for p in listener.of(TrialPending)] == [
        (0, 3, (0, 1, 2), ("n0", "n1", "n2")),
        (0, 3, (2,), ("n2",)),
        (1, 3, (1,), ("n1",)),
    ]
