"""What is said of a run's own mishaps."""

import pytest
from msgspec import Raw, structs
from seen import seen_of, together, with_arrivals, with_events

from ddpdiag.checks.api import Check, Nothing, Seen
from ddpdiag.checks.host import limits
from ddpdiag.checks.launch import variables as variables_check
from ddpdiag.checks.launch.variables import GROUP_CLASS_VARIABLE
from ddpdiag.checks.run import budget as run004
from ddpdiag.checks.run import presence, roll_call
from ddpdiag.checks.run import trials as run003
from ddpdiag.model import Event, EventKind, Finding, Outcome, ProcessState, Severity, Status
from ddpdiag.probes.host.limits import ResourceLimits
from ddpdiag.stats import Samples

DIED, DONE, HUNG, RAISED, UNHEARD = Status.DIED, Status.DONE, Status.HUNG, Status.RAISED, Status.UNHEARD
ERROR, NOTE = Severity.ERROR, Severity.NOTE
STEADY = Samples(min=1.0, median=1.0, p95=1.0, count=1)


def run_of(*outcomes: Outcome, size: int = 4) -> Seen[Nothing]:
    """A trial of COL001 over `size` ranks that ended like this."""
    seen = seen_of(run003.CHECK, dict.fromkeys(range(size), Nothing()))
    trial = structs.replace(seen.trials[0], code="COL001", groups=(tuple(range(size)),), params={"backend": "gloo"})
    recording = structs.replace(seen.recording, trials=(trial,), outcomes=outcomes)
    return Seen(seen.world, seen.check, recording)


def outcome(rank: int, status: Status, **more: object) -> Outcome:
    return Outcome(trial=0, code="COL001", rank=rank, status=status, **more)  # type: ignore[arg-type]


def judge_as(check: Check[Nothing], seen: Seen[Nothing]) -> list[Finding]:
    return list(check.judge(Seen(seen.world, check, seen.recording)))


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1
    return findings[0]


def test_a_clean_run_is_silent() -> None:
    seen = run_of(*(outcome(rank, DONE, data=Raw(b"{}")) for rank in range(4)))
    for check in (roll_call.CHECK, presence.CHECK, run003.CHECK, run004.CHECK):
        assert list(check.judge(seen)) == []


def absent_in(seen: Seen[Nothing], *ranks: int, layout: tuple[str, ...] = (), **more: object) -> Finding:
    """RUN001's finding for ranks that never came."""
    arrivals = {rank: arrival for rank, arrival in seen.world.arrivals.items() if rank not in ranks}
    events = [Event(kind=EventKind.ABSENT, rank=rank, seconds=15.0, **more) for rank in ranks]  # type: ignore[arg-type]
    seen = with_events(with_arrivals(seen, arrivals), *events)
    header = structs.replace(seen.recording.header, layout=layout)
    return only(judge_as(roll_call.CHECK, Seen(seen.world, seen.check, structs.replace(seen.recording, header=header))))


@pytest.mark.parametrize(
    ("size", "absent", "more", "ranks", "hosts"),
    [
        pytest.param(4, (3,), {}, (3,), (), id="the host where their neighbours live is said"),
        pytest.param(
            6, (4, 5), {"layout": ("n0", "n0", "n1", "n1", "n7", "n7")}, (4, 5), ("n7",),
            id="the launcher's layout names it",
        ),
        pytest.param(
            6, (4, 5), {"layout": ("n0", "n1", "n7", "n0", "n1", "n7")}, (4, 5), (),
            id="a layout that is not true of those who came is not believed",
        ),
        pytest.param(4, (2, 3), {}, (), (), id="no other host came, so nobody is blamed"),
        pytest.param(4, (1, 2, 3), {}, (1,), (), id="one of the only host that came, and nobody else"),
    ],
)  # fmt: skip
def test_absent_ranks_are_named_with_what_is_known_of_their_host(golden, size, absent, more, ranks, hosts) -> None:
    finding = absent_in(run_of(size=size), *absent, **more)
    assert (finding.code, finding.severity) == ("RUN001.absent", ERROR)
    assert (finding.ranks, finding.hosts) == (ranks, hosts)
    golden(finding)


def test_ranks_that_meet_over_loopback_are_all_on_one_host_and_blamed() -> None:
    seen = run_of(size=4)
    local = {rank: structs.replace(own, master_addr="127.0.0.1") for rank, own in seen.world.arrivals.items()}
    assert absent_in(with_arrivals(seen, local), 2, 3).ranks == (2, 3)


def test_a_rank_that_may_not_exist_is_not_blamed(golden) -> None:
    finding = absent_in(with_events(run_of(), Event(kind=EventKind.MISMATCH, rank=2, detail="3", host="n1")), 3)
    assert finding.ranks == ()
    golden(finding)


def lost(*ranks: int, seconds: float = 8.0, **more: object) -> list[Event]:
    return [Event(kind=EventKind.LOST, rank=rank, seconds=seconds, detail="x", **more) for rank in ranks]  # type: ignore[arg-type]


TWICE_REPORTED = (*lost(0, seconds=8.1, reporter=2), *lost(0, seconds=8.4, reporter=3), *lost(1))
# The number of ranks, what is known of their loss, and the findings.
LOSSES = {
    "one rank": (4, lost(2), [("lost", (2,), ("n1",))]),
    "a host": (6, [*lost(2), *lost(3, seconds=9.0)], [("lost", (2, 3), ("n1",))]),
    "different times": (6, [*lost(2), *lost(3, seconds=30.0)], [("lost", (2,), ("n1",)), ("lost", (3,), ("n1",))]),
    "reported twice": (6, TWICE_REPORTED, [("lost", (0, 1), ("n0",))]),
    "all other hosts at once": (6, lost(2, 3, 4, 5), [("cut-off", (0, 1), ("n0",))]),
    "all other hosts, which answer": (
        6,
        lost(2, 3, 4, 5, host_answered=True),
        [("lost", (2, 3), ("n1",)), ("lost", (4, 5), ("n2",))],
    ),
    "one of two hosts": (4, lost(2, 3), [("link", (), ())]),
    "rank 0's of two hosts": (4, lost(0, 1, reporter=2), [("link", (), ())]),
    "one of two hosts, which answers": (4, lost(2, 3, host_answered=True), [("lost", (2, 3), ("n1",))]),
    "a host that does not answer": (6, lost(2, host_answered=False), [("lost", (2,), ("n1",))]),
    "a host that was not asked": (6, lost(2, host_answered=None), [("lost", (2,), ("n1",))]),
}


@pytest.mark.parametrize(("size", "events", "expected"), LOSSES.values(), ids=LOSSES)
def test_a_lost_rank_is_blamed_on_its_host_or_the_link(golden, size, events, expected) -> None:
    findings = judge_as(presence.CHECK, with_events(run_of(size=size), *events))
    assert [(f.code.removeprefix("RUN002."), f.ranks, f.hosts) for f in findings] == expected
    assert all({*f.links} == {"n0 -> n1", "n1 -> n0"} for f in findings if f.code == "RUN002.link")
    golden(*findings)


def test_one_ranks_own_record_tells_that_rank_0_was_lost() -> None:
    seen = run_of(size=4)
    alone = with_arrivals(seen, {2: seen.world.arrivals[2]})
    assert only(judge_as(presence.CHECK, with_events(alone, *lost(0, reporter=2)))).ranks == (0,)


def test_the_hung_rank_is_named_with_where_it_stands_and_where_the_others_wait(golden) -> None:
    waiting = [outcome(r, HUNG, step_count=5, last_step="all_reduce 4 B: wait") for r in (0, 1, 3)]
    process = ProcessState(pid=77, state="S", stack=("sleep (user.py:3)",))
    guilty = outcome(2, HUNG, step_count=4, last_step="all_reduce 4 B: post", process=process)
    finding = only(list(run003.judge(run_of(*waiting, guilty))))
    assert (finding.code, finding.ranks, finding.hosts) == ("RUN003.hung", (2,), ("n1",))
    golden(finding)


def crashed(**how: object) -> Finding:
    """RUN003's finding for rank 2, which ends another one's waiting."""
    dead = outcome(2, last_step="all_reduce 4 B: post", **{"status": DIED} | how)  # type: ignore[arg-type]
    return only(list(run003.judge(run_of(outcome(0, HUNG, interrupted=True), dead))))


def test_a_crash_shows_how_the_process_ended_and_its_last_words(golden) -> None:
    finding = crashed(error="killed by SIGSEGV", detail="Fatal Python error")
    assert (finding.code, finding.evidence["output"]) == ("RUN003.died", "Fatal Python error")
    golden(finding)


def test_a_limit_of_processor_time_has_its_own_fix() -> None:
    finding = crashed(error="killed by SIGXCPU")
    assert (finding.code, finding.ranks, "ulimit -t" in finding.fix) == ("RUN003.died", (2,), True)


def test_a_rank_that_sent_no_result_explains_the_others(golden) -> None:
    waiting = [outcome(rank, HUNG, interrupted=True, last_step="all_reduce 4 B: wait") for rank in (0, 1, 3)]
    silent = outcome(2, UNHEARD, error="its process reported nothing")
    finding = only(list(run003.judge(run_of(*waiting, silent))))
    assert (finding.code, finding.ranks, finding.hosts) == ("RUN003.unheard", (2,), ("n1",))
    golden(finding)


def test_an_exception_is_not_told_twice() -> None:
    said = "RuntimeError: no"
    finding = crashed(status=RAISED, error=said, detail=f"File a\n  f(x)\n{said}")
    assert (said in finding.message, "output" in finding.evidence) == (True, False)


def test_of_several_guilty_ranks_none_only_waited_and_one_stack_is_shown(golden) -> None:
    stood = ProcessState(pid=7, state="S", stack=("f (user.py:3)",))
    hung = [outcome(r, HUNG, step_count=4 if r in (1, 3) else 5, process=stood) for r in range(6)]
    finding = only(list(run003.judge(run_of(*hung, size=6))))
    assert finding.ranks == (1, 3)
    assert [name for name in finding.evidence if name.startswith("stack")] == ["stack_of_rank_1", "stack_of_rank_5"]
    golden(finding)


def test_a_process_that_survives_sigkill_is_named_with_where_it_waits(golden) -> None:
    process = ProcessState(pid=77, state="D", wchan="nvidia_ioctl", survived=True)
    finding, survivor = run003.judge(run_of(outcome(2, HUNG, process=process), size=4))
    assert (finding.code, survivor.code) == ("RUN003.hung", "RUN003.survived")
    golden(finding)


BYSTANDER = ProcessState(pid=78, state="D", survived=True)
SURVIVED = {
    "a bystander's": (outcome(2, DIED), outcome(1, HUNG, interrupted=True, process=BYSTANDER)),
    "reported by a later trial": (
        outcome(1, HUNG, process=ProcessState(pid=79)),
        outcome(1, DONE, survivors=(ProcessState(pid=79, state="D", wchan="nvidia_close", survived=True),)),
    ),
}


@pytest.mark.parametrize("outcomes", SURVIVED.values(), ids=SURVIVED)
def test_each_process_that_survives_is_named(golden, outcomes) -> None:
    (finding,) = (finding for finding in run003.judge(run_of(*outcomes)) if finding.code == "RUN003.survived")
    assert (finding.ranks, finding.hosts) == ((1,), ("n0",))
    golden(finding)


def test_a_hang_in_which_all_stand_alike_blames_nobody(golden) -> None:
    finding = only(list(run003.judge(run_of(outcome(0, HUNG, step_count=5), outcome(1, HUNG, step_count=5), size=2))))
    assert (finding.ranks, finding.hosts) == ((), ())
    golden(finding)


def test_what_a_lost_rank_left_unfinished_is_not_told_twice() -> None:
    seen = run_of(outcome(0, HUNG, interrupted=True), outcome(2, UNHEARD))
    assert list(run003.judge(with_events(seen, Event(kind=EventKind.LOST, rank=2)))) == []


def test_the_same_ranks_failing_alike_are_told_once() -> None:
    seen = run_of(outcome(2, HUNG), size=4)
    again = structs.replace(seen.recording.trials[0], number=1)
    later = structs.replace(seen.recording.outcomes[0], trial=1)
    recording = structs.replace(
        seen.recording, trials=(*seen.recording.trials, again), outcomes=(*seen.recording.outcomes, later)
    )
    assert len(list(run003.judge(Seen(seen.world, seen.check, recording)))) == 1


def test_a_large_run_is_judged_group_by_group() -> None:
    seen = run_of(size=2048)
    alone = structs.replace(seen.recording.trials[0], groups=tuple((rank,) for rank in range(2048)), params={})
    trials = tuple(structs.replace(alone, number=number) for number in range(8))
    outcomes = tuple(
        structs.replace(outcome(rank, RAISED if rank == 7 else DONE), trial=number)
        for number in range(8)
        for rank in range(2048)
    )
    recording = structs.replace(seen.recording, trials=trials, outcomes=outcomes)
    assert only(list(run003.judge(Seen(seen.world, seen.check, recording)))).ranks == (7,)


def test_a_spent_budget_and_a_signal_are_said() -> None:
    budget = Event(kind=EventKind.BUDGET, seconds=57.0, detail="before TRN001 could run")
    told = Event(kind=EventKind.SIGNAL, seconds=2.0, detail="15")
    findings = judge_as(run004.CHECK, with_events(run_of(), budget, told))
    assert [(each.code, each.is_about_run) for each in findings] == [("RUN004.budget", True), ("RUN004.told", True)]


def test_a_budget_that_a_hang_used_up_is_a_note(golden) -> None:
    spent = Event(kind=EventKind.BUDGET, seconds=57.0, detail="before TRN001 could run")
    stopped = outcome(3, HUNG, step_count=2, process=ProcessState(pid=7, state="T"))
    seen = with_events(run_of(*(outcome(rank, HUNG, step_count=2) for rank in range(3)), stopped), spent)
    finding = only(judge_as(run004.CHECK, seen))
    assert (finding.code, finding.severity, finding.is_about_run) == ("RUN004.budget", NOTE, True)
    golden(finding)
    healthy = run_of(*(outcome(rank, DONE) for rank in range(4)))
    assert only(judge_as(run004.CHECK, with_events(healthy, spent))).severity is ERROR


def test_who_pressed_ctrl_c_is_not_told_to_find_out_who_did(golden) -> None:
    told = Event(kind=EventKind.LEAVING, rank=1, seconds=3.25, detail="2")
    finding = only(judge_as(run004.CHECK, with_events(run_of(), told)))
    assert (finding.code, finding.severity, finding.fix) == ("RUN004.told", NOTE, "")
    golden(finding)


def test_a_rank_that_was_still_going_on_is_a_want_of_time_and_nobodys_fault(golden) -> None:
    going = ProcessState(pid=7, state="R", step_seconds=0.01)
    waiting = ProcessState(pid=8, state="S", step_seconds=3.0)
    seen = run_of(
        outcome(0, HUNG, step_count=45, last_step="training step 45 of 56", process=going),
        *(
            outcome(rank, HUNG, step_count=46, last_step="training step 46 of 56", process=waiting)
            for rank in (1, 2, 3)
        ),
    )
    assert judge_as(run003.CHECK, seen) == []
    finding = only(judge_as(run004.CHECK, seen))
    assert (finding.code, finding.severity) == ("RUN004.unfinished", ERROR)
    assert (finding.ranks, finding.hosts) == ((), ())
    golden(finding)


def test_a_rank_that_may_start_no_process_is_the_limits_fault(golden) -> None:
    error = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    seen = run_of(outcome(0, HUNG, interrupted=True), outcome(1, RAISED, error=error), size=2)
    narrow = ResourceLimits(nofile=None, memlock=None, nproc=18)
    rows = {rank: limits.Data(limits=narrow, user_processes=6) for rank in range(2)}
    both = together(seen, seen_of(limits.CHECK, rows, size=2))
    found = {f.code: f for check in (limits.CHECK, run003.CHECK) for f in judge_as(check, both)}
    assert {code: f.severity for code, f in found.items()} == {"HST004.processes": ERROR, "RUN003.raised": NOTE}
    assert found["RUN003.raised"].ranks == ()
    golden(*found.values())


def opening(*variables: str | None, at: str = "communicator") -> Finding:
    """RUN003's finding for a group of NCCL that all ranks hang in, where LCH002 saw these values of the variable."""
    frames = ("_create_nccl2_process_group (distributed_c10d.py:870)", "_new_process_group_helper (d.py:3206)")
    rows = {
        r: variables_check.Data({} if v is None else {GROUP_CLASS_VARIABLE: v}, {}) for r, v in enumerate(variables)
    }
    hung = [
        outcome(
            r, HUNG, step_count=5, last_step=at, process=ProcessState(pid=r + 9, state="S", stack=(frames[v == "0"],))
        )
        for r, v in enumerate(variables)
    ]
    seen = run_of(*hung, size=len(variables))
    trial = structs.replace(seen.recording.trials[0], params={"backend": "nccl"})
    seen = Seen(seen.world, seen.check, structs.replace(seen.recording, trials=(trial,)))
    both = together(seen, seen_of(variables_check.CHECK, rows, size=len(variables)))
    return only([f for f in judge_as(run003.CHECK, both) if f.code == "RUN003.hung"])


def test_ranks_that_open_different_process_groups_for_nccl_hang_and_none_is_blamed(golden) -> None:
    finding = opening(None, "0", None)
    assert (finding.ranks, "LCH002.process-group explains" in finding.title) == ((), True)
    golden(finding)


def test_a_rank_that_waits_in_a_collective_is_not_blamed_whatever_its_variable() -> None:
    assert opening(None, None, None).ranks == ()
    assert opening(None, "0", None, at="all_reduce 4 B: wait").ranks == ()
    assert opening(None, "0", None, at="read the digits").ranks == (1,)
