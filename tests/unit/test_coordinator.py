"""The coordinator against a stand-in for the control server, whose ranks follow a script. No process, no socket."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec import Raw, Struct, structs
from seen import arrival_of, made_check

from ddpdiag.checks.api import Check, Scope, Seen, Stage, blocked, inapplicable, new_trial
from ddpdiag.model import EventKind, Finding, Header, Kind, Options, Outcome, Recording, Status, Trial
from ddpdiag.model.news import (
    CheckBegan,
    Gathered,
    Happened,
    News,
    Pending,
    Progressed,
    StageBegan,
    StageEnded,
    Started,
    TrialBegan,
    Waiting,
)
from ddpdiag.runtime.control.membership import Patience
from ddpdiag.runtime.control.messages import (
    BarrierOpen,
    BarrierReached,
    Downward,
    Hello,
    Leaving,
    Partial,
    Ping,
    Pong,
    Refused,
    RunTrial,
    Start,
    Stop,
    Upward,
)
from ddpdiag.runtime.coordinator.coordinator import Coordinator
from ddpdiag.runtime.coordinator.dispatch import DispatchedTrial, ProgressReporter

Answer = Callable[[int, Downward], list[Upward]]
N = TypeVar("N", bound=News)


class Nothing(Struct, frozen=True):
    pass


def no_findings(seen: Seen[Nothing]) -> Iterator[Finding]:
    yield from ()


def check(code: str = "COL001", scope: Scope = Scope.WORLD, kind: Kind = Kind.PLAIN, **more: object) -> Check[Nothing]:
    return made_check(code, scope, kind, stage=Stage.COLLECTIVE, measure=lambda ctx: Nothing(), **more)


def outcome(rank: int, trial: Trial, status: Status = Status.DONE, **more: object) -> Outcome:
    return Outcome(trial=trial.number, code=trial.code, rank=rank, status=status, **more)  # type: ignore[arg-type]


def obedient(rank: int, message: Downward) -> list[Upward]:
    match message:
        case RunTrial(trial):
            return [outcome(rank, trial, data=Raw(b"{}"))]
        case Ping():
            return [Pong()]
        case _:
            return []


def raises(rank: int, message: Downward) -> list[Upward]:
    return [outcome(rank, message.trial, Status.RAISED)] if isinstance(message, RunTrial) else [Pong()]


def gated(rank: int, message: Downward, *, shares: bool = False) -> list[Upward]:
    match message:
        case RunTrial(trial):
            return [BarrierReached(trial.number, f"port of {rank}", shares)]
        case BarrierOpen():
            return [Outcome(trial=message.trial, code="COL001", rank=rank, status=Status.DONE)]
        case _:
            return [Pong()]


@dataclass
class StandIn:
    """A control server whose ranks answer at once, as `answer` says. The first messages are their hellos."""

    size: int
    answer: Answer = obedient
    missing: frozenset[int] = frozenset()
    sent: list[tuple[int, Downward]] = field(default_factory=list)
    waiting: list[tuple[bytes, Upward]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = [rank for rank in range(self.size) if rank not in self.missing]
        self.waiting = [(b"%d" % rank, Hello(arrival_of(rank, self.size))) for rank in ranks]

    def send(self, identity: bytes, message: Downward) -> None:
        if isinstance(message, Refused):
            self.refused.append(message.sentence)
            return
        rank = int(identity)
        self.sent.append((rank, message))
        self.waiting += [(identity, reply) for reply in self.answer(rank, message)]

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Upward]]:
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
HURRY = Patience(beat=0.005, lost=0.05, grace=0.01, wind_down=0.05)


def conduct(
    server: StandIn,
    *checks: Check[Nothing],
    signal: int | None = None,
    options: Options | None = None,
    listener: Quiet | None = None,
) -> Recording:
    header = Header(
        run_id="r",
        world_size=server.size,
        launcher="hand",
        options=options or Options(),
        created="",
        version="0",
    )
    return Coordinator(server, header, checks, listener or Quiet(), lambda: signal, HURRY).run(0.05)  # type: ignore[arg-type]


def statuses(recording: Recording) -> list[Status]:
    return [o.status for o in recording.outcomes]


def test_every_rank_gets_its_place_and_its_orders() -> None:
    server = StandIn(3)
    recording = conduct(server, check())
    assert [rank for rank, message in server.sent if isinstance(message, Start)] == [0, 1, 2]
    assert statuses(recording) == [Status.DONE] * 3
    assert recording.end is not None


def test_the_recording_tells_when_each_trial_was_handed_out() -> None:
    run = conduct(StandIn(2), check(), check("COL003"))
    begins = [trial.begin_seconds for trial in run.trials]
    assert None not in begins
    assert begins == sorted(begins)
    assert run.end is not None
    assert begins[-1] <= run.end.seconds


def test_an_exchange_tells_everybody_where_everybody_is_and_what_it_offers() -> None:
    server = StandIn(3, partial(gated, shares=True))
    conduct(server, check())
    peers = {message.peers for _, message in server.sent if isinstance(message, BarrierOpen)}
    assert [[offer for _, offer in own] for own in peers] == [["port of 0", "port of 1", "port of 2"]]


def test_the_barrier_opens_when_all_have_reached_it_with_the_first_ones_offer() -> None:
    server = StandIn(2, gated)
    conduct(server, check())
    openings = [message for _, message in server.sent if isinstance(message, BarrierOpen)]
    assert [(barrier_open.offer, barrier_open.host) for barrier_open in openings] == [("port of 0", "127.0.0.1")] * 2


def test_a_missing_rank_is_noted_and_checks_of_the_world_are_left_out(golden) -> None:
    recording = conduct(StandIn(3, missing=frozenset({1})), check("HST001", Scope.RANK), check())
    assert [(e.kind, e.rank) for e in recording.events] == [(EventKind.ABSENT, 1)]
    assert [o.rank for o in recording.outcomes] == [0, 2]
    (skip,) = recording.skips
    assert (skip.code, skip.grounds) == ("COL001", False)
    golden(skip.reason)


def test_a_silent_rank_is_lost_and_unheard_and_its_peers_are_told_to_stop() -> None:
    def one_dies(rank: int, message: Downward) -> list[Upward]:
        match message:
            case RunTrial():
                return []
            case Stop(number):
                return [Outcome(trial=number, code="COL001", rank=rank, status=Status.HUNG, told=True)]
            case _:
                return [Pong()] if rank != 2 else []

    recording = conduct(StandIn(3, one_dies), check())
    assert [(e.kind, e.rank) for e in recording.events] == [(EventKind.LOST, 2)]
    assert statuses(recording) == [Status.HUNG, Status.HUNG, Status.UNHEARD]


def test_a_rank_that_did_not_receive_that_its_part_is_over_is_told_again(monkeypatch) -> None:
    monkeypatch.setattr("ddpdiag.runtime.coordinator.dispatch._REPEAT_SECONDS", 0.01)
    stops: list[int] = []

    def hears_the_second(rank: int, message: Downward) -> list[Upward]:
        match message:
            case RunTrial() if rank == 1:
                return raises(rank, message)
            case Stop(number) if rank == 0:
                stops.append(number)
                told = Outcome(trial=number, code="COL001", rank=0, status=Status.HUNG, told=True)
                return [told] if len(stops) > 1 else []
            case RunTrial():
                return []
            case _:
                return [Pong()]

    assert statuses(conduct(StandIn(2, hears_the_second), check())) == [Status.HUNG, Status.RAISED]


def test_what_was_handed_over_is_kept_when_the_run_ends_in_the_middle() -> None:
    def cut_short(rank: int, message: Downward) -> list[Upward]:
        match message:
            case RunTrial(trial):
                return [Partial(trial.number, Raw(b"1"), "one"), Partial(trial.number, Raw(b"[2]"), "two")]
            case Ping():
                return [Leaving(2)]
            case _:
                return []

    listener = Quiet()
    recording = conduct(StandIn(2, cut_short), check(), listener=listener)
    assert [bytes(o.so_far) for o in recording.outcomes] == [b"[2]"] * 2
    assert [news.text for news in listener.of(Progressed)] == ["one", "two"]


def test_what_a_lost_rank_had_handed_over_is_kept() -> None:
    def dies(rank: int, message: Downward) -> list[Upward]:
        match message:
            case RunTrial(trial):
                return [Partial(trial.number, Raw(b"1"))] if rank == 1 else []
            case Stop(number):
                return [Outcome(trial=number, code="COL001", rank=rank, status=Status.HUNG, told=True)]
            case _:
                return [Pong()] if rank != 1 else []

    recording = conduct(StandIn(2, dies), check())
    assert {o.rank: bytes(o.so_far) for o in recording.outcomes} == {0: b"null", 1: b"1"}


def test_a_failure_does_not_stop_ranks_of_other_groups() -> None:
    server = StandIn(3, lambda rank, message: (raises if rank == 1 else obedient)(rank, message))
    assert statuses(conduct(server, check("HST001", Scope.RANK))) == [Status.DONE, Status.RAISED, Status.DONE]
    assert not any(isinstance(message, Stop) for _, message in server.sent)


def test_a_rank_without_torch_takes_no_further_part() -> None:
    def no_torch(rank: int, message: Downward) -> list[Upward]:
        match message:
            case RunTrial(trial) if rank == 1:
                return [outcome(rank, trial, Status.HUNG, at="import torch")]
            case _:
                return obedient(rank, message)

    recording = conduct(StandIn(2, no_torch), check("LCH003", Scope.RANK), check("COL001", kind=Kind.TORCH))
    assert [skip.code for skip in recording.skips] == ["COL001"]


def test_plain_checks_run_before_those_that_wait_for_torch() -> None:
    recording = conduct(StandIn(1), check("LCH003", Scope.RANK, Kind.TORCH), check("HST001", Scope.RANK))
    assert [trial.code for trial in recording.trials] == ["HST001", "LCH003"]


def test_a_blocked_check_is_left_out() -> None:
    first = check("COL001")
    recording = conduct(
        StandIn(2, raises), first, check("TRN001", skip=lambda seen: blocked(seen.of(first).failure_text))
    )
    assert [skip.code for skip in recording.skips] == ["TRN001"]


def test_missing_ground_is_an_excuse_unless_the_check_was_asked_for() -> None:
    groundless = check("GPU002", skip=lambda seen: inapplicable("no GPU"))
    assert conduct(StandIn(1), groundless).skips[0].grounds
    assert not conduct(StandIn(1), groundless, options=Options(select=("GPU002",))).skips[0].grounds


def test_a_rank_below_0_is_refused_and_nothing_is_noted_of_it() -> None:
    server = StandIn(2)
    server.waiting.insert(0, (b"-1", Hello(arrival_of(-1, 2, ranks_per_node=1))))
    recording = conduct(server, check())
    assert len(server.refused) == 1
    assert (recording.events, len(recording.outcomes)) == ((), 2)


def test_a_second_process_with_a_rank_is_refused_and_noted(golden) -> None:
    twin = structs.replace(arrival_of(1, 2), pid=99, nonce="another")
    server = StandIn(2)
    server.waiting = [server.waiting[0], (b"1", Hello(arrival_of(1, 2))), (b"9", Hello(twin))]
    recording = conduct(server, check())
    assert [(e.kind, e.rank) for e in recording.events] == [(EventKind.DUPLICATE, 1)]
    golden(*server.refused)


def test_ranks_that_got_a_signal_are_witnesses_and_the_silent_one_is_lost() -> None:
    def killed(rank: int, message: Downward) -> list[Upward]:
        match message:
            case RunTrial():
                return [Leaving(15)] if rank in (0, 1) else []
            case _:
                return [Pong()] if rank != 2 else []

    recording = conduct(StandIn(3, killed), check())
    kinds = {(e.kind, e.rank) for e in recording.events}
    assert kinds == {(EventKind.LEAVING, 0), (EventKind.LEAVING, 1), (EventKind.LOST, 2)}
    assert statuses(recording) == [Status.SKIPPED, Status.SKIPPED, Status.UNHEARD]


def test_a_signal_ends_the_run_with_what_was_seen() -> None:
    recording = conduct(StandIn(2), check(), signal=15)
    assert EventKind.SIGNAL in {event.kind for event in recording.events}
    assert recording.end is not None


def coordinator_of(server: StandIn, told: Callable[[], int | None]) -> Coordinator:
    header = Header(run_id="r", world_size=server.size, launcher="hand", options=Options(), created="", version="0")
    return Coordinator(server, header, (check(),), Quiet(), told, HURRY)  # type: ignore[arg-type]


def test_a_signal_after_the_last_trial_is_told_apart() -> None:
    server = StandIn(2)
    coordinator = coordinator_of(server, lambda: None)
    assert coordinator.run(0.05).events == ()
    assert coordinator.late_signal() is None
    server.waiting.append((b"1", Leaving(15)))
    coordinator.idle()
    assert coordinator.late_signal() == 15


def test_a_signal_in_the_middle_of_a_run_is_in_its_recording_and_no_late_one() -> None:
    coordinator = coordinator_of(StandIn(2), lambda: 2)
    assert [event.kind for event in coordinator.run(0.05).events] == [EventKind.SIGNAL]
    assert coordinator.late_signal() is None


def test_a_rank_that_comes_when_the_run_was_told_to_end_learns_that_as_its_exit_code() -> None:
    server = StandIn(2, missing=frozenset({1}))
    codes = []
    coordinator = coordinator_of(server, lambda: 15)
    coordinator.run(0.05)
    server.send = lambda _identity, message: codes.append(message.exit_code)  # type: ignore[method-assign]
    server.waiting.append((b"1", Hello(arrival_of(1, 2))))
    coordinator.idle()
    assert codes == [143]


def test_a_spent_budget_ends_the_run() -> None:
    recording = conduct(StandIn(2), check(), options=Options(budget_seconds=3.5))
    assert [event.kind for event in recording.events] == [EventKind.BUDGET]


def test_a_plan_sees_what_came_of_its_trials_before() -> None:
    def thrice(seen: Seen[Nothing]) -> tuple[Trial, ...]:
        return (new_trial(seen, params={"n": len(seen.rows)}),) if len(seen.trials) < 3 else ()

    recording = conduct(StandIn(2), check(plan=thrice))
    assert [trial.params["n"] for trial in recording.trials] == [0, 2, 4]
    assert [trial.number for trial in recording.trials] == [1, 2, 3]


# Checks that run last ------------------------------------------------------------------------------------------------


def last(code: str = "GPU010", takes: float = 0.1, **more: object) -> Check[Nothing]:
    def plan(seen: Seen[Nothing]) -> tuple[Trial, ...]:
        return (new_trial(seen),) if seen.is_last and not seen.trials else ()

    return check(code, last_seconds=lambda seen: takes, **{"plan": plan, **more})


def five_seconds(*checks: Check[Nothing]) -> Recording:
    """Of these, 3 are for the end of the run."""
    return conduct(StandIn(2), *checks, options=Options(budget_seconds=5.0))


def test_for_checks_that_run_last_time_is_kept_so_that_they_run_when_the_others_have_none(golden) -> None:
    recording = five_seconds(last(), check())
    assert [trial.code for trial in recording.trials] == ["GPU010"]
    assert [event.kind for event in recording.events] == [EventKind.BUDGET]
    golden(recording.events[0].detail)


def test_others_have_so_much_less_time() -> None:
    (cut, _) = conduct(StandIn(2), check(), last(takes=2.0), options=Options(budget_seconds=11.0)).trials
    assert cut.hurried
    assert 4.0 < cut.deadline_seconds < 4.4  # of 5.3


def looks_twice(**more: object) -> Check[Nothing]:
    """Once in its stage, and once at the end."""

    def plan(seen: Seen[Nothing]) -> tuple[Trial, ...]:
        return (new_trial(seen),) if len(seen.trials) == seen.is_last else ()

    return last("COL000", plan=plan, **more)


def test_one_that_looks_twice_looks_before_the_others_and_after_them() -> None:
    recording = conduct(StandIn(2), looks_twice(), check(), last())
    assert [trial.code for trial in recording.trials] == ["COL000", "COL001", "COL000", "GPU010"]
    assert [trial.attempt for trial in recording.trials] == [0, 0, 1, 0]


def test_time_is_kept_for_the_second_look() -> None:
    recording = five_seconds(looks_twice(), check())
    assert [trial.code for trial in recording.trials] == ["COL000", "COL000"]


def test_one_that_looks_twice_is_left_out_once() -> None:
    recording = conduct(StandIn(2), looks_twice(skip=lambda seen: inapplicable("one host")), check())
    assert [skip.reason for skip in recording.skips] == ["one host"]
    assert [trial.code for trial in recording.trials] == ["COL001"]


def test_where_they_have_nothing_to_do_nothing_is_kept() -> None:
    for idle in (last(plan=lambda seen: ()), last(skip=lambda seen: inapplicable("no GPU"))):
        recording = five_seconds(check(), idle)
        assert [trial.code for trial in recording.trials] == ["COL001"]
        assert recording.events == ()


def test_one_that_takes_longer_than_what_is_left_is_left_out_rather_than_cut_short(golden) -> None:
    recording = five_seconds(last(takes=2.1))
    assert recording.trials == ()
    (skip,) = recording.skips
    assert (skip.code, skip.grounds) == ("GPU010", False)
    golden(skip.reason)


def test_of_two_that_run_last_the_first_leaves_time_for_the_second() -> None:
    first, second = conduct(StandIn(2), last(), last("GPU011"), options=Options(budget_seconds=9.0)).trials
    assert first.deadline_seconds < 3.1
    assert second.deadline_seconds > 5.0


def test_a_run_that_gets_a_signal_does_not_wait_for_them() -> None:
    def told(rank: int, message: Downward) -> list[Upward]:
        return [Leaving(2)] if isinstance(message, RunTrial) else [Pong()]

    recording = conduct(StandIn(2, told), check(), last())
    assert [trial.code for trial in recording.trials] == ["COL001"]
    assert not recording.skips


# What the run tells --------------------------------------------------------------------------------------------------


def told(server: StandIn, *checks: Check[Nothing], signal: int | None = None) -> Quiet:
    listener = Quiet()
    conduct(server, *checks, signal=signal, listener=listener)
    return listener


def test_the_run_tells_its_course_in_order() -> None:
    listener = told(StandIn(2), check())
    kinds = [type(news) for news in listener.news if not isinstance(news, Waiting)]
    assert kinds == [Started, Gathered, StageBegan, CheckBegan, TrialBegan, StageEnded]
    assert listener.of(Gathered) == [Gathered(ranks=2, hosts=1, missing=())]
    (ended,) = listener.of(StageEnded)
    assert (ended.name, ended.status, ended.failed, ended.more) == ("collective", "done", (), False)


def test_who_is_waited_for_is_told() -> None:
    listener = told(StandIn(3, missing=frozenset({1})), check())
    assert all(1 in news.missing for news in listener.of(Waiting))
    assert listener.of(Gathered)[0].missing == (1,)


def test_a_stage_in_which_nothing_ran_was_skipped() -> None:
    assert [e.status for e in told(StandIn(3, missing=frozenset({1})), check()).of(StageEnded)] == ["skipped"]


def test_a_stage_whose_trial_failed_names_the_check() -> None:
    (ended,) = told(StandIn(2, raises), check()).of(StageEnded)
    assert (ended.status, ended.failed) == ("failed", ("COL001",))


def test_a_stage_with_and_without_torch_is_over_once() -> None:
    listener = told(StandIn(2), check(), check("COL003", kind=Kind.TORCH))
    assert [(e.name, e.more) for e in listener.of(StageEnded)] == [("collective", True), ("collective", False)]


def test_a_stage_is_over_before_its_checks_look_once_more_at_the_end() -> None:
    listener = told(StandIn(2), looks_twice(), check("COL003", kind=Kind.TORCH))
    assert [e.more for e in listener.of(StageEnded)] == [True, False, False]


def test_a_signal_is_told_and_the_interrupted_stage_has_no_end(golden) -> None:
    listener = told(StandIn(2), check(), signal=2)
    golden(*(news.text for news in listener.of(Happened)))
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
    telling.pending(dispatched, arrivals)
    assert listener.of(Pending) == []
    for seconds in (2.0, 2.5):
        now[0] = seconds
        telling.pending(dispatched, arrivals)
    dispatched.reached_barrier(0, "", shares=False)
    dispatched.reached_barrier(1, "", shares=False)
    now[0] = 3.0
    telling.pending(dispatched, arrivals)
    dispatched.pending -= {0, 2}
    dispatched.done(0)
    dispatched.fail(2)  # it has ended, and not done its part
    now[0] = 4.0
    telling.pending(dispatched, arrivals)
    assert [(p.done, p.ranks, p.awaited, p.hosts) for p in listener.of(Pending)] == [
        (0, 3, (0, 1, 2), ("n0", "n1", "n2")),
        (0, 3, (2,), ("n2",)),
        (1, 3, (1,), ("n1",)),
    ]
