"""Who is blamed, from what the ranks left behind."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_collective_traces import collective, trace

from ddpdiag.checks.blame import find_blame, is_echo, is_unfinished, ranks_failed_outside_backend, usual_step
from ddpdiag.model import Collective, Kind, Outcome, ProcessState, Status, Trial

ECHO = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"


def outcome(
    rank: int, status: Status, *, step: int = 5, told: bool = False, error: str = "", **process: object
) -> Outcome:
    state = ProcessState(pid=1, **process) if process else None
    return Outcome(
        trial=1, code="X", rank=rank, status=status, step_count=step, interrupted=told, error=error, process=state
    )


HUNG, DIED, RAISED, UNHEARD = Status.HUNG, Status.DIED, Status.RAISED, Status.UNHEARD
WAITS, SLEEPS, LOADS, ITEM = "wait (c10d.py:10)", "sleep (user.py:1)", "load (data.py:3)", "item (train.py:3)"
INIT, STEPS = "_new_process_group_helper (distributed_c10d.py:9)", "_step_by_step (collectives.py:7)"
IN_A_CALL = "all_reduce (distributed_c10d.py:3007)"
ILLEGAL = "AcceleratorError: CUDA error: an illegal memory access was encountered"
KILLED = "killed by SIGKILL"


def lost(rank: int, status: Status, seconds: float = 0.0) -> Outcome:
    """A rank that lost the memory that it shared with a peer."""
    if status is RAISED:
        return structs.replace(outcome(rank, status, error=ILLEGAL), seconds=seconds)
    return structs.replace(outcome(rank, status, error="killed by SIGABRT"), detail=ILLEGAL, seconds=seconds)


AT_15_S = [structs.replace(outcome(rank, HUNG, step=5 - (rank == 1)), seconds=15.2) for rank in (1, 2)]


def hung(*ranks: int, step: int = 5, told: bool = False, posted: tuple[Collective, ...] | None = None) -> list[Outcome]:
    return [structs.replace(outcome(rank, HUNG, step=step, told=told), collectives=posted) for rank in ranks]


def echoing(*ranks: int, posted: tuple[Collective, ...] | None = None) -> list[Outcome]:
    return [structs.replace(outcome(rank, RAISED, error=ECHO), collectives=posted) for rank in ranks]


def aborted(rank: int, detail: str) -> Outcome:
    return structs.replace(outcome(rank, DIED, error="killed by SIGABRT"), detail=detail)


def posted(rank: int, upto: int, frame: str = WAITS, *, told: bool = False) -> Outcome:
    """A hung rank that posted so many collectives."""
    return structs.replace(outcome(rank, HUNG, told=told, state="S", stack=(frame,)), collectives=trace(upto))


def posting(rank: int, frame: str, *, posted: tuple[Collective, ...] | None = ()) -> Outcome:
    """A rank that hangs as it posts its first collective, which creates the communicator of the older NCCL groups."""
    return structs.replace(outcome(rank, HUNG, state="S", stack=(frame,)), collectives=posted)


def staying(*steps_places_stacks: tuple[int, str, str]) -> list[Outcome]:
    return [
        structs.replace(outcome(rank, HUNG, step=step, state="S", stack=(stack,)), last_step=at, collectives=trace(1))
        for rank, (step, at, stack) in enumerate(steps_places_stacks)
    ]


REMOTE = "... ncclRemoteError: ... remote process exited ..."
SIZES = "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
ALIKE = [outcome(rank, RAISED, error="ValueError: no backend foo") for rank in range(3)]

# The outcomes of a group, and the ranks to blame.
CASES: dict[str, tuple[list[Outcome], tuple[int, ...]]] = {
    "a rank that sent no result explains the others": (
        [outcome(0, DIED), *hung(1, step=3), outcome(3, RAISED, error="own"), outcome(2, UNHEARD)], (2,),
    ),
    "silence of all ranks": ([outcome(rank, UNHEARD) for rank in range(3)], ()),
    "a crash explains hangs and echoes": ([*echoing(0), *hung(1, step=2), outcome(2, DIED)], (2,)),
    "aborts by NCCL's watchdog are echoes": (
        [aborted(0, REMOTE), aborted(2, REMOTE), outcome(1, RAISED, error="injected")], (1,),
    ),
    "only aborts by NCCL's watchdog": ([aborted(0, REMOTE), aborted(2, REMOTE)], ()),
    "a lone abort among ranks that were ended": ([*hung(0, 2, told=True), aborted(1, ECHO)], (1,)),
    "raised by itself": ([*hung(0, told=True), outcome(2, RAISED, error="injected"), *echoing(1)], (2,)),
    "echoes alone": (echoing(0, 1), ()),
    "all failed alike": (ALIKE, ()),
    "all failed, not alike": ([*ALIKE, outcome(3, RAISED, error="OSError: other")], (0, 1, 2, 3)),
    "the only rank failed": (ALIKE[:1], (0,)),
    "short of the common step": ([*hung(0, 1, 3), *hung(2, step=4)], (2,)),
    "rank 0 is short of the common step": ([*hung(0, step=4), *hung(1, 2)], (0,)),
    "stopped": ([outcome(rank, HUNG, state="T" if rank == 1 else "S") for rank in range(3)], (1,)),
    "stuck in a driver": ([outcome(rank, HUNG, state="D" if rank == 1 else "S") for rank in range(3)], (1,)),
    "elsewhere in the code at equal steps": (
        [outcome(rank, HUNG, state="S", stack=(SLEEPS if rank == 2 else WAITS,)) for rank in range(3)], (2,),
    ),
    "did not post the collective of the others": ([posted(0, 7), posted(1, 6, SLEEPS), posted(2, 7)], (1,)),
    "of two, one posted no further collective": ([posted(0, 7), posted(1, 6, SLEEPS)], (1,)),
    "waits in an older collective": ([posted(0, 7), posted(1, 6), posted(2, 7)], ()),
    "was ended before it posted as many": (
        [posted(0, 7, "wait (a.py:1)"), posted(1, 6, "add (user.py:1)", told=True), posted(2, 7, "wait (b.py:1)")], (),
    ),
    "posted another size, its step is the furthest": (
        [*hung(0, 1, 3, posted=trace(4)), *hung(2, step=9, posted=(*trace(3), collective(4, elements=5)))], (2,),
    ),
    "the innocent one reports the size": (
        [*echoing(0, 3, posted=trace(1)), aborted(1, SIZES), *hung(2, told=True, posted=trace(1, elements=8))], (2,),
    ),
    "a mismatch of two": ([*hung(0, posted=trace(1, elements=1)), *hung(1, posted=trace(1, elements=2))], ()),
    "a crash comes before a mismatch": (
        [
            *hung(0, 2, told=True, posted=trace(1, elements=1)), *hung(1, told=True, posted=trace(1, elements=2)),
            outcome(3, DIED, error="killed by SIGSEGV"),
        ], (3,),
    ),
    "holds the GIL, so its step counts": ([*hung(0, 1, 3, posted=trace(1)), outcome(2, HUNG, step=4, state="R")], (2,)),
    "two at one step": (hung(0, 1), ()),
    "a lone hang": (hung(3), (3,)),
    "only one did not end": ([outcome(0, Status.DONE), *hung(3)], (3,)),
    "a link between two others was cut": (
        staying((6, "barrier: wait", STEPS), (5, "init_process_group", INIT), (5, "init_process_group", INIT)), (),
    ),
    "a slow link: one is still in the collective": (
        staying((9, "destroy", STEPS), (8, "all_reduce: wait", STEPS), (9, "destroy", STEPS)), (),
    ),
    "a slow name server: rank 0 serves the store": (
        staying((5, "init", "_create_c10d_store (rendezvous.py:1)"), (5, "init", INIT), (5, "init", INIT)), (),
    ),
    "of two, one never calls the first collective": ([posting(1, LOADS), posting(0, IN_A_CALL)], (1,)),
    "of four, one never calls the first collective": (
        [posting(1, LOADS), *(posting(rank, IN_A_CALL) for rank in (0, 2, 3))], (1,),
    ),
    "a single rank waits in the first collective": (
        [*(posting(rank, LOADS) for rank in (0, 1, 3)), posting(2, IN_A_CALL)], (0, 1, 3),
    ),
    "something was posted": ([posting(0, IN_A_CALL, posted=trace(1)), posting(1, ITEM, posted=trace(1))], ()),
    "what was posted cannot be read": ([posting(0, IN_A_CALL, posted=None), posting(1, ITEM, posted=None)], ()),
    "all create a communicator": ([posting(rank, IN_A_CALL) for rank in range(2)], ()),
    "memory of a dead peer, raised": ([lost(0, RAISED), lost(2, RAISED), outcome(1, DIED, error=KILLED)], (1,)),
    "memory of a dead peer, died": ([lost(0, DIED), lost(2, DIED), outcome(1, DIED, error=KILLED)], (1,)),
    "memory of a peer that was killed at its deadline": ([lost(0, RAISED, 15.4), *AT_15_S], (1,)),
    "memory lost before its peer's deadline": ([lost(0, RAISED, 9.0), *AT_15_S], (0,)),
    "an illegal access of its own": (
        [lost(0, RAISED), aborted(1, ECHO), structs.replace(outcome(2, HUNG), seconds=15.0)], (0,),
    ),
    "an illegal access of its own, died": ([lost(0, DIED), *hung(1, told=True)], (0,)),
}  # fmt: skip


@pytest.mark.parametrize(("outcomes", "ranks"), CASES.values(), ids=CASES)
def test_blamed_ranks(golden, outcomes: list[Outcome], ranks: tuple[int, ...]) -> None:
    blame = find_blame(outcomes)
    assert blame is not None
    assert blame.ranks == ranks
    golden(blame.why)


def test_no_rank_is_blamed_when_all_is_done() -> None:
    assert find_blame([outcome(rank, Status.DONE) for rank in range(4)]) is None


def test_echoes_and_the_front() -> None:
    assert not is_echo(structs.replace(outcome(0, DIED), error="killed by SIGSEGV", detail=ECHO))
    assert is_echo(outcome(0, HUNG, told=True))
    assert usual_step([*hung(0, step=1), *hung(1, step=2)]) == 2, "of two equally common steps the higher one"


@pytest.mark.parametrize(
    "said",
    [
        "[TC][rank=0][name=0] Aborting process on rank 0 due to timeout - timeout watchdog detected operation timeout",
        "[TC][rank=0][name=0] Aborting process on rank 0 due to error - nccl hit async error: remote process exited or",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21, OpType=ALLREDUCE, NumelIn=1000",
    ],
)
def test_a_watchdog_of_either_process_group_ends_who_waited(said: str) -> None:
    assert is_echo(aborted(0, said))
    assert find_blame([aborted(0, said), *hung(1)]).ranks == (1,)


@given(st.lists(st.tuples(st.sampled_from(Status), st.integers(0, 5), st.booleans()), min_size=1, max_size=8))
def test_only_ranks_that_failed_are_ever_blamed(rows: list[tuple[Status, int, bool]]) -> None:
    outcomes = [outcome(rank, status, step=step, told=told) for rank, (status, step, told) in enumerate(rows)]
    blame = find_blame(outcomes)
    failed = {o.rank for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)}
    assert (blame is None) == (not failed)
    if blame is not None:
        assert failed.issuperset(blame.ranks)


@given(st.integers(0, 30), st.integers(3, 31), st.integers(1, 9))
def test_one_rank_that_differs_from_the_others_is_found_in_any_world(guilty: int, size: int, upto: int) -> None:
    guilty %= size
    steps = [outcome(rank, HUNG, step=2 if rank == guilty else 3) for rank in range(size)]
    fewer = [posted(r, upto - (r == guilty), SLEEPS if r == guilty else WAITS) for r in range(size)]
    sizes = [structs.replace(posted(r, 3), collectives=trace(3, elements=4 + (r == guilty))) for r in range(size)]
    for outcomes in (steps, fewer, sizes):
        assert find_blame(outcomes).ranks == (guilty,)


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
    first, second = find_blame(outcomes), find_blame(shuffled)
    assert (first and (first.ranks, first.why)) == (second and (second.ranks, second.why))


@given(st.lists(ROWS, min_size=2, max_size=7))
def test_who_was_told_to_stop_is_never_blamed_beside_a_failure_of_its_own_accord(rows: list[tuple]) -> None:
    outcomes = rows_of(rows)
    if any(o.status in (Status.DIED, Status.RAISED) and not is_echo(o) for o in outcomes):
        blame = find_blame(outcomes)
        assert blame is not None
        assert not {o.rank for o in outcomes if o.interrupted}.intersection(blame.ranks)


def test_where_messages_do_not_arrive_it_proves_nothing_where_a_rank_waits() -> None:
    short = [outcome(0, Status.HUNG, step=3), *(outcome(rank, Status.HUNG) for rank in (1, 2))]
    assert find_blame(short).ranks == (0,)
    blame = find_blame(short, "the port is closed")
    assert (blame.ranks, blame.why) == ((), "the port is closed")
    stopped = [outcome(0, Status.HUNG, state="T"), *short[1:]]
    assert find_blame(stopped, "the port is closed").ranks == (0,)


IMPORTING = structs.replace(outcome(0, HUNG, step=0, state="R", busy=True), last_step="import torch")
WAITING = [outcome(rank, HUNG, step=7, state="S", step_seconds=5.0) for rank in (1, 2)]


@pytest.mark.parametrize(
    ("last", "hurried", "expected"),
    [
        pytest.param(outcome(0, HUNG, state="R", step_seconds=0.2), False, True, id="it takes steps"),
        pytest.param(outcome(0, HUNG, state="R", step_seconds=0.8), False, False, id="its last step is long ago"),
        pytest.param(outcome(0, HUNG, state="T", step_seconds=0.2), False, False, id="it is stopped"),
        pytest.param(outcome(0, HUNG, step=1, state="S", step_seconds=0.2), False, False, id="it has only begun"),
        pytest.param(outcome(0, HUNG, state="R", busy=True, step_seconds=8.0), True, True, id="busy and hurried"),
        pytest.param(outcome(0, HUNG, state="R", busy=True, step_seconds=8.0), False, False, id="it spins"),
        pytest.param(outcome(0, HUNG, state="S", step_seconds=8.0), True, False, id="it sleeps"),
        pytest.param(outcome(0, DIED), True, False, id="a crash beside a rank that takes steps"),
        pytest.param(IMPORTING, False, True, id="an import that uses a core"),
        pytest.param(
            structs.replace(IMPORTING, process=ProcessState(pid=1, state="S")), False, False, id="an import that waits"
        ),
    ],
)
def test_a_rank_that_was_still_taking_steps_has_not_hung(last: Outcome, hurried: bool, expected: bool) -> None:
    trial = Trial(code="X", groups=((0, 1, 2),), kind=Kind.TORCH, deadline_seconds=10.0, is_shortened=hurried)
    beside = outcome(3, HUNG, state="R", step_seconds=0.1)
    outcomes = [last, *([beside] if last.status is DIED else WAITING)]
    assert is_unfinished(trial, find_blame(outcomes), outcomes) is expected


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
    assert ranks_failed_outside_backend(failed, "mock") == ranks
