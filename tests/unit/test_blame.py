"""Who is blamed, from what the ranks left behind."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_collective_traces import collective, trace

from ddpdiag.checks.blame import blamed, front, is_echo, stopped_by_themselves, unfinished
from ddpdiag.model import Collective, Kind, Outcome, ProcessState, Status, Trial

ECHO = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"


def outcome(
    rank: int, status: Status, *, step: int = 5, told: bool = False, error: str = "", **process: object
) -> Outcome:
    state = ProcessState(pid=1, **process) if process else None
    return Outcome(trial=1, code="X", rank=rank, status=status, step=step, told=told, error=error, process=state)


def test_nobody_is_blamed_when_all_is_done() -> None:
    assert blamed([outcome(rank, Status.DONE) for rank in range(4)]) is None


def test_an_unheard_rank_explains_everything_else() -> None:
    others = [outcome(0, Status.DIED), outcome(1, Status.HUNG, step=3), outcome(3, Status.RAISED, error="own")]
    assert blamed([*others, outcome(2, Status.UNHEARD)]).ranks == (2,)


def test_silence_of_all_ranks_blames_none_of_them() -> None:
    assert blamed([outcome(rank, Status.UNHEARD) for rank in range(3)]).ranks == ()


def test_a_crash_explains_the_hangs_and_echoes_around_it() -> None:
    outcomes = [outcome(0, Status.RAISED, error=ECHO), outcome(1, Status.HUNG, step=2), outcome(2, Status.DIED)]
    assert blamed(outcomes).ranks == (2,)


def test_an_abort_by_nccls_watchdog_is_an_echo() -> None:
    words = {"error": "killed by SIGABRT", "detail": "... ncclRemoteError: ... remote process exited ..."}
    aborted = [structs.replace(outcome(rank, Status.DIED), **words) for rank in (0, 2)]
    assert blamed([*aborted, outcome(1, Status.RAISED, error="injected")]).ranks == (1,)
    assert blamed(aborted).ranks == ()


@pytest.mark.parametrize(
    "said",
    [
        "[TC][rank=0][name=0] Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout",
        "[TC][rank=0][name=0] Aborting process on rank 0 due to error - nccl hit async error: remote process exited or",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21, OpType=ALLREDUCE, NumelIn=1000",
    ],
)
def test_a_watchdog_of_either_process_group_ends_who_waited(said: str) -> None:
    aborted = structs.replace(outcome(0, Status.DIED, error="killed by SIGABRT"), detail=said)
    assert is_echo(aborted)
    assert blamed([aborted, outcome(1, Status.HUNG)]).ranks == (1,)


def test_a_segfault_is_no_echo_whatever_was_printed_before() -> None:
    assert not is_echo(structs.replace(outcome(0, Status.DIED), error="killed by SIGSEGV", detail=ECHO))


def test_a_lone_abort_among_ranks_that_were_told_to_stop_is_blamed() -> None:
    aborted = structs.replace(outcome(1, Status.DIED), error="killed by SIGABRT", detail=ECHO)
    told = [outcome(rank, Status.HUNG, told=True) for rank in (0, 2)]
    assert blamed([*told, aborted]).ranks == (1,)


def test_who_raised_by_itself_is_blamed_and_not_who_was_told_to_stop() -> None:
    outcomes = [
        outcome(0, Status.HUNG, told=True),
        outcome(2, Status.RAISED, error="injected"),
        outcome(1, Status.RAISED, error=ECHO),
    ]
    assert blamed(outcomes).ranks == (2,)


def test_echoes_alone_blame_nobody() -> None:
    blame = blamed([outcome(0, Status.RAISED, error=ECHO), outcome(1, Status.RAISED, error=ECHO)])
    assert blame is not None
    assert blame.ranks == ()


def test_the_rank_short_of_the_common_step_is_blamed() -> None:
    outcomes = [outcome(rank, Status.HUNG, step=4 if rank == 2 else 5) for rank in range(4)]
    assert blamed(outcomes).ranks == (2,)


def test_rank_0_can_be_guilty() -> None:
    outcomes = [outcome(rank, Status.HUNG, step=4 if rank == 0 else 5) for rank in range(3)]
    assert blamed(outcomes).ranks == (0,)


def test_a_stopped_process_is_blamed_although_all_stand_at_one_step() -> None:
    outcomes = [outcome(rank, Status.HUNG, state="T" if rank == 1 else "S") for rank in range(3)]
    assert blamed(outcomes).ranks == (1,)


def test_a_process_stuck_in_a_driver_is_blamed() -> None:
    outcomes = [outcome(rank, Status.HUNG, state="D" if rank == 1 else "S") for rank in range(3)]
    assert blamed(outcomes).ranks == (1,)


def test_the_one_that_stands_elsewhere_in_the_code_is_blamed_at_equal_steps() -> None:
    frames = {0: "wait (c10d.py:10)", 1: "wait (c10d.py:12)", 2: "sleep (user.py:1)"}
    outcomes = [outcome(rank, Status.HUNG, state="S", stack=(frame,)) for rank, frame in frames.items()]
    assert blamed(outcomes).ranks == (2,)


def posted(rank: int, upto: int, frame: str = "wait (c10d.py:10)", *, told: bool = False) -> Outcome:
    """A hung rank that posted so many collectives."""
    return structs.replace(outcome(rank, Status.HUNG, told=told, state="S", stack=(frame,)), collectives=trace(upto))


def test_who_did_not_post_the_collective_in_which_the_others_wait_is_blamed(golden) -> None:
    blame = blamed([posted(0, 7), posted(1, 6, "sleep (user.py:1)"), posted(2, 7)])
    assert blame.ranks == (1,)
    golden(blame.why)


def test_of_two_ranks_the_one_that_left_the_last_collective_and_posted_no_other_is_blamed() -> None:
    assert blamed([posted(0, 7), posted(1, 6, "sleep (user.py:1)")]).ranks == (1,)


def test_who_waits_like_the_others_in_an_older_collective_is_not_blamed(golden) -> None:
    blame = blamed([posted(0, 7), posted(1, 6), posted(2, 7)])
    assert blame.ranks == ()
    golden(blame.why)


def test_who_was_told_to_stop_had_less_time_to_post_as_many() -> None:
    told = posted(1, 6, "compute (user.py:1)", told=True)
    assert blamed([posted(0, 7, "wait (a.py:1)"), told, posted(2, 7, "wait (b.py:1)")]).ranks == ()


def test_who_posted_another_size_than_most_is_blamed_although_its_step_is_the_furthest(golden) -> None:
    wrong = structs.replace(outcome(2, Status.HUNG, step=9), collectives=(*trace(3), collective(4, elements=5)))
    blame = blamed([*(structs.replace(outcome(r, Status.HUNG), collectives=trace(4)) for r in (0, 1, 3)), wrong])
    assert (blame.ranks, blame.status, len(blame.sides)) == ((2,), Status.HUNG, 2)
    golden(blame.why)


def test_the_innocent_one_that_complains_of_a_size_is_not_blamed() -> None:
    complaint = (
        "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
    )
    aborted = structs.replace(outcome(1, Status.DIED, error="killed by SIGABRT"), detail=complaint)
    wrong = structs.replace(outcome(2, Status.HUNG, told=True), collectives=trace(1, elements=8))
    others = [structs.replace(outcome(r, Status.RAISED, error=ECHO), collectives=trace(1)) for r in (0, 3)]
    assert blamed([*others, aborted, wrong]).ranks == (2,)


def test_a_mismatch_of_two_ranks_blames_neither_and_tells_both_sides() -> None:
    pair = [structs.replace(outcome(r, Status.HUNG), collectives=trace(1, elements=r + 1)) for r in (0, 1)]
    blame = blamed(pair)
    assert (blame.ranks, len(blame.sides)) == ((), 2)


def test_a_crash_of_its_own_comes_before_a_mismatch() -> None:
    wrong = [
        structs.replace(outcome(r, Status.HUNG, told=True), collectives=trace(1, elements=1 + r % 2)) for r in (0, 1, 2)
    ]
    assert blamed([*wrong, outcome(3, Status.DIED, error="killed by SIGSEGV")]).ranks == (3,)


def test_a_rank_that_cannot_say_what_it_posted_is_judged_by_its_step() -> None:
    holds_the_gil = outcome(2, Status.HUNG, step=4, state="R")
    others = [structs.replace(outcome(r, Status.HUNG), collectives=trace(1)) for r in (0, 1, 3)]
    assert blamed([*others, holds_the_gil]).ranks == (2,)


def test_two_ranks_at_one_step_cannot_be_told_apart() -> None:
    assert blamed([outcome(0, Status.HUNG), outcome(1, Status.HUNG)]).ranks == ()


def test_a_lone_hang_needs_no_comparison() -> None:
    assert blamed([outcome(3, Status.HUNG)]).ranks == (3,)
    assert blamed([outcome(0, Status.DONE), outcome(3, Status.HUNG)]).ranks == (3,)


INIT, WAIT = "_new_process_group_helper (distributed_c10d.py:9)", "_step_by_step (collectives.py:7)"


@pytest.mark.parametrize(
    ("steps", "places", "stacks"),
    [
        pytest.param(
            (6, 5, 5), ("barrier: wait", "init_process_group tcp://", "init_process_group tcp://"), (WAIT, INIT, INIT),
            id="a link between two others was cut, so one rank waits for both",
        ),
        pytest.param(
            (9, 8, 9), ("destroy_process_group", "all_reduce 4 B: wait", "destroy_process_group"), (WAIT, WAIT, WAIT),
            id="a slow link: one rank is still in the collective that the others have ended",
        ),
        pytest.param(
            (5, 5, 5), ("init_process_group tcp://",) * 3, ("_create_c10d_store (rendezvous.py:1)", INIT, INIT),
            id="a name server of another host is slow, and rank 0 serves the store",
        ),
    ],
)  # fmt: skip
def test_a_rank_that_is_ahead_or_waits_in_a_collective_is_not_blamed(steps, places, stacks) -> None:
    hung = [
        structs.replace(outcome(rank, Status.HUNG, step=step, state="S", stack=(stack,)), at=at, collectives=trace(1))
        for rank, (step, at, stack) in enumerate(zip(steps, places, stacks, strict=True))
    ]
    assert blamed(hung).ranks == ()


def test_of_two_equally_common_steps_the_higher_is_the_front() -> None:
    assert front([outcome(0, Status.HUNG, step=1), outcome(1, Status.HUNG, step=2)]) == 2


def test_being_told_to_stop_is_an_echo() -> None:
    assert is_echo(outcome(0, Status.HUNG, told=True))


@given(st.lists(st.tuples(st.sampled_from(Status), st.integers(0, 5), st.booleans()), min_size=1, max_size=8))
def test_only_ranks_that_failed_are_ever_blamed(rows: list[tuple[Status, int, bool]]) -> None:
    outcomes = [outcome(rank, status, step=step, told=told) for rank, (status, step, told) in enumerate(rows)]
    blame = blamed(outcomes)
    failed = {o.rank for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)}
    assert (blame is None) == (not failed)
    if blame is not None:
        assert failed.issuperset(blame.ranks)


@given(st.integers(0, 30), st.integers(3, 31))
def test_one_rank_short_of_the_others_is_found_in_any_world(guilty: int, size: int) -> None:
    guilty %= size
    outcomes = [outcome(rank, Status.HUNG, step=2 if rank == guilty else 3) for rank in range(size)]
    assert blamed(outcomes).ranks == (guilty,)


ROWS = st.tuples(
    st.sampled_from([Status.HUNG, Status.HUNG, Status.RAISED, Status.DIED, Status.DONE]),
    st.integers(4, 5),
    st.booleans(),
    st.one_of(st.none(), st.lists(st.builds(collective, st.integers(1, 3), elements=st.integers(1, 2)), max_size=3)),
    st.sampled_from(["wait (c10d.py:1)", "sleep (user.py:1)"]),
)


def rows_of(rows: list[tuple]) -> list[Outcome]:
    return [
        structs.replace(
            outcome(rank, status, step=step, told=told and status is Status.HUNG, state="S", stack=(frame,)),
            collectives=None if posted is None else tuple(posted),
        )
        for rank, (status, step, told, posted, frame) in enumerate(rows)
    ]


@given(st.lists(ROWS, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_the_order_of_the_outcomes_does_not_change_who_is_blamed(rows: list[tuple], random: Random) -> None:
    outcomes = rows_of(rows)
    shuffled = random.sample(outcomes, len(outcomes))
    first, second = blamed(outcomes), blamed(shuffled)
    assert (first and (first.ranks, first.why)) == (second and (second.ranks, second.why))


@given(st.lists(ROWS, min_size=2, max_size=7))
def test_who_was_told_to_stop_is_never_blamed_beside_a_failure_of_its_own_accord(rows: list[tuple]) -> None:
    outcomes = rows_of(rows)
    if any(o.status in (Status.DIED, Status.RAISED) and not is_echo(o) for o in outcomes):
        blame = blamed(outcomes)
        assert blame is not None
        assert not {o.rank for o in outcomes if o.told}.intersection(blame.ranks)


@given(st.integers(0, 30), st.integers(3, 31), st.integers(1, 9))
def test_one_rank_that_posted_fewer_is_found_in_any_world(guilty: int, size: int, upto: int) -> None:
    guilty %= size
    outcomes = [
        posted(r, upto - (r == guilty), "sleep (user.py:1)" if r == guilty else "wait (c10d.py:1)") for r in range(size)
    ]
    assert blamed(outcomes).ranks == (guilty,)


@given(st.integers(0, 30), st.integers(3, 31))
def test_one_rank_that_posted_another_size_is_found_in_any_world(guilty: int, size: int) -> None:
    guilty %= size
    outcomes = [structs.replace(posted(r, 3), collectives=trace(3, elements=4 + (r == guilty))) for r in range(size)]
    assert blamed(outcomes).ranks == (guilty,)


def test_ranks_that_all_failed_alike_are_not_blamed() -> None:
    alike = [outcome(rank, Status.RAISED, error="ValueError: no backend foo") for rank in range(3)]
    assert blamed(alike).ranks == ()
    assert blamed([*alike, outcome(3, Status.RAISED, error="OSError: other")]).ranks == (0, 1, 2, 3)
    assert blamed(alike[:1]).ranks == (0,)


def test_where_messages_do_not_arrive_it_proves_nothing_where_a_rank_waits() -> None:
    short = [outcome(0, Status.HUNG, step=3), *(outcome(rank, Status.HUNG) for rank in (1, 2))]
    assert blamed(short).ranks == (0,)
    blame = blamed(short, "the port is closed")
    assert (blame.ranks, blame.why) == ((), "the port is closed")
    stopped = [outcome(0, Status.HUNG, state="T"), *short[1:]]
    assert blamed(stopped, "the port is closed").ranks == (0,)


def trial(*, hurried: bool = False) -> Trial:
    return Trial(code="X", groups=((0, 1, 2),), kind=Kind.TORCH, deadline_seconds=10.0, hurried=hurried)


def wants_time(last: Outcome, *, hurried: bool = False) -> bool:
    outcomes = [last, *(outcome(rank, Status.HUNG, step=7, state="S", step_seconds=5.0) for rank in (1, 2))]
    return unfinished(trial(hurried=hurried), blamed(outcomes), outcomes)


def test_a_rank_that_was_still_taking_steps_has_not_hung() -> None:
    assert wants_time(outcome(0, Status.HUNG, state="R", step_seconds=0.2))
    assert not wants_time(outcome(0, Status.HUNG, state="R", step_seconds=0.8))
    assert not wants_time(outcome(0, Status.HUNG, state="T", step_seconds=0.2)), "it is stopped"
    assert not wants_time(outcome(0, Status.HUNG, step=1, state="S", step_seconds=0.2)), "it has only begun"


def test_a_busy_rank_has_not_hung_if_the_budget_left_it_less_time_than_usual() -> None:
    busy = outcome(0, Status.HUNG, state="R", busy=True, step_seconds=8.0)
    assert wants_time(busy, hurried=True)
    assert not wants_time(busy), "it had all its time: it spins"
    assert not wants_time(outcome(0, Status.HUNG, state="S", step_seconds=8.0), hurried=True)


def test_a_crash_is_never_a_want_of_time() -> None:
    outcomes = [outcome(0, Status.DIED), outcome(1, Status.HUNG, state="R", step_seconds=0.1)]
    assert not unfinished(trial(hurried=True), blamed(outcomes), outcomes)


def test_an_import_that_uses_a_core_has_not_hung() -> None:
    importing = structs.replace(outcome(0, Status.HUNG, step=0, state="R", busy=True), at="import torch")
    assert wants_time(importing)
    assert not wants_time(structs.replace(importing, process=ProcessState(pid=1, state="S")))


# Before the first collective, and after the end of a peer -------------------------------------------------------------

IN_A_CALL = "all_reduce (distributed_c10d.py:3007)"
ILLEGAL = "AcceleratorError: CUDA error: an illegal memory access was encountered"


def posting(rank: int, frame: str, *, posted: tuple[Collective, ...] | None = (), told: bool = False) -> Outcome:
    """A rank that hangs as it posts its first collective, which creates the communicator of the older NCCL groups."""
    return structs.replace(outcome(rank, Status.HUNG, state="S", stack=(frame,), told=told), collectives=posted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_never_calls_the_first_collective_is_blamed(ranks: int) -> None:
    waiting = [posting(rank, IN_A_CALL) for rank in range(ranks) if rank != 1]
    found = blamed([posting(1, "load (data.py:3)"), *waiting])
    assert (found.ranks, found.why) == ((1,), "it is not in a call of torch.distributed; the others are")


def test_a_single_rank_that_waits_in_the_first_collective_is_not_the_odd_one() -> None:
    away = [posting(rank, "load (data.py:3)") for rank in (0, 1, 3)]
    assert blamed([*away, posting(2, IN_A_CALL)]).ranks == (0, 1, 3)


def test_where_something_was_posted_or_cannot_be_read_a_rank_may_wait_outside_of_torch_distributed() -> None:
    for posted in (trace(1), None):
        waiting = [posting(0, IN_A_CALL, posted=posted), posting(1, "item (train.py:3)", posted=posted)]
        assert blamed(waiting).ranks == ()


def test_ranks_that_all_create_a_communicator_cannot_be_told_apart() -> None:
    assert blamed([posting(rank, IN_A_CALL) for rank in range(2)]).ranks == ()


def lost_memory(rank: int, status: Status, seconds: float) -> Outcome:
    if status is Status.RAISED:
        return structs.replace(outcome(rank, status, error=ILLEGAL), seconds=seconds)
    return structs.replace(outcome(rank, status, error="killed by SIGABRT"), detail=ILLEGAL, seconds=seconds)


@pytest.mark.parametrize("status", [Status.RAISED, Status.DIED])
def test_who_lost_the_memory_of_a_dead_peer_is_not_blamed(status: Status) -> None:
    victims = [lost_memory(rank, status, 3.0) for rank in (0, 2)]
    dead = structs.replace(outcome(1, Status.DIED, error="killed by SIGKILL"), seconds=3.0)
    assert blamed([*victims, dead]).ranks == (1,)


@pytest.mark.parametrize(("seconds", "guilty"), [(15.4, (1,)), (9.0, (0,))])
def test_who_lost_the_memory_of_a_peer_that_was_killed_at_its_deadline_is_not_blamed(
    seconds: float, guilty: tuple[int, ...]
) -> None:
    """But who lost memory before that did so by itself, and its peer only waited."""
    hung = [structs.replace(outcome(rank, Status.HUNG, step=5 - (rank == 1)), seconds=15.2) for rank in (1, 2)]
    assert blamed([lost_memory(0, Status.RAISED, seconds), *hung]).ranks == guilty


def test_an_illegal_access_of_its_own_is_blamed_and_not_the_echo_around_it() -> None:
    echo = structs.replace(outcome(1, Status.DIED, error="killed by SIGABRT"), detail=ECHO)
    hung = structs.replace(outcome(2, Status.HUNG), seconds=15.0)
    assert blamed([lost_memory(0, Status.RAISED, 3.0), echo, hung]).ranks == (0,)
    assert blamed([lost_memory(0, Status.DIED, 3.0), outcome(1, Status.HUNG, told=True)]).ranks == (0,)


NCCL_ERROR = "DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error"
HUNG_IN_NCCL = [posted(0, 7), posted(1, 7)]


@pytest.mark.parametrize(
    ("failed", "ranks"),
    [
        pytest.param([posted(0, 7), posted(1, 6, "sleep (user.py:1)")], (1,), id="one never posts it"),
        pytest.param([posted(0, 7), outcome(1, Status.RAISED, error="ValueError: of its own")], (1,), id="raises"),
        pytest.param([posted(0, 7), outcome(1, Status.DIED, error="left with exit code 1")], (1,), id="exits"),
        pytest.param([posted(0, 7), outcome(1, Status.DIED, error="killed by SIGKILL")], (1,), id="is killed"),
        pytest.param([posted(0, 7), outcome(1, Status.HUNG, state="T")], (1,), id="is stopped"),
        pytest.param(
            [posted(0, 7), structs.replace(posted(1, 7), collectives=trace(7, elements=9))], (0, 1), id="size"
        ),
        pytest.param(HUNG_IN_NCCL, (), id="all hang in it"),
        pytest.param([posted(0, 8), posted(1, 7)], (), id="it ended on some"),
        pytest.param([outcome(0, Status.HUNG, step=6), outcome(1, Status.HUNG, step=5)], (), id="steps alone"),
        pytest.param([posted(0, 7), outcome(1, Status.RAISED, error=NCCL_ERROR)], (), id="an error of NCCL"),
        pytest.param([posted(0, 7), outcome(1, Status.RAISED, error="RuntimeError: mock: broken")], (), id="backend"),
        pytest.param([posted(0, 7), outcome(1, Status.DIED, error="killed by SIGSEGV")], (), id="crashes"),
        pytest.param([posted(0, 7), outcome(1, Status.RAISED, error=ECHO)], (), id="an echo"),
        pytest.param([outcome(0, Status.DONE), outcome(1, Status.DONE)], (), id="nothing failed"),
    ],
)
def test_a_rank_that_stops_a_collective_by_itself_is_told_from_a_backend_that_fails(failed, ranks) -> None:
    assert stopped_by_themselves(failed, "mock") == ranks
