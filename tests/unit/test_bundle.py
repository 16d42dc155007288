"""What the ranks of a failed trial left behind, in words."""

import pytest
from msgspec import structs
from test_collective_traces import collective, trace
from test_run_checks import only, outcome, run_of

from ddpdiag.checks.blame import find_blame
from ddpdiag.checks.failure_evidence import crash_line, failure_evidence, waiting_text
from ddpdiag.checks.run import trials
from ddpdiag.model import Outcome, ProcessState, Status

WAIT = "connect all ranks: wait"


def hung(rank: int, upto: int | None, at: str = WAIT, step: int = 8, frame: str = "wait (c10d.py:7)") -> Outcome:
    """A rank that posted so many collectives, or does not say."""
    stack = (frame, "measure (col001.py:54)", "_measure (worker.py:95)", "main (worker.py:42)")
    process = ProcessState(pid=100 + rank, state="S", stack=stack)
    last = None if upto is None else trace(upto, elements=1)
    return outcome(rank, Status.HUNG, last_step=at, step_count=step, process=process, collectives=last)


GUILTY = hung(2, 6, "connect all ranks: post", 7, "_forever (user.py:3)")
WAITING = [hung(rank, 7) for rank in (0, 1, 3)]


DEAD = outcome(2, Status.DIED, error="killed by SIGSEGV")
ECHOES = [
    outcome(r, Status.RAISED, error=f"Connection closed by peer [10.0.0.{r}]:{r}", collectives=trace(1))
    for r in (0, 1, 3)
]


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param([*WAITING, GUILTY], id="for-one-that-is-behind"),
        pytest.param([*WAITING, structs.replace(GUILTY, collectives=())], id="for-one-that-posted-none"),
        pytest.param([*WAITING, structs.replace(GUILTY, collectives=None)], id="for-one-that-does-not-say"),
        pytest.param([DEAD, *ECHOES], id="beside-a-crash"),
        pytest.param([hung(0, 7), hung(1, 7)], id="for-nobody"),
    ],
)
def test_it_is_said_who_waits_for_whom_in_which_collective(golden, outcomes) -> None:
    golden(waiting_text(find_blame(outcomes), outcomes))


def test_ranks_that_say_nothing_are_not_said_to_wait() -> None:
    silent = [hung(0, None), hung(1, None)]
    assert waiting_text(find_blame(silent), silent) == ""


def test_collectives_that_cannot_be_read_are_said_to_be_so(golden) -> None:
    why = "torch 2.15.0 keeps no record of what ucc does"
    silent = [structs.replace(hung(rank, None), why_no_collectives=why) for rank in (0, 1)]
    (line,) = failure_evidence((), silent)["ranks"]
    golden(line)


@pytest.mark.parametrize(
    "outcomes",
    [[*WAITING, GUILTY], [*WAITING, structs.replace(GUILTY, collectives=None)], [*ECHOES, DEAD]],
    ids=["hung", "holds-the-gil", "echoes-of-any-address"],
)
def test_ranks_that_stand_alike_are_one_line_and_the_guilty_come_first(golden, outcomes) -> None:
    lines = failure_evidence((2,), outcomes)["ranks"]
    assert [line.partition(":")[0] for line in lines] == ["rank 2", "ranks 0-1,3"]
    golden(*lines)


def test_the_stacks_of_the_guilty_and_of_one_that_waits_end_where_the_worker_begins() -> None:
    evidence = failure_evidence((2,), [*WAITING, GUILTY])
    assert evidence["stack_of_rank_2"] == ["_forever (user.py:3)", "measure (col001.py:54)"]
    assert [name for name in evidence if name.startswith("stack")] == ["stack_of_rank_2", "stack_of_rank_3"]


def test_thousands_of_ranks_that_all_differ_do_not_flood_the_report() -> None:
    outcomes = [hung(rank, 1, at=f"step {rank}") for rank in range(3000)]
    lines = failure_evidence((), outcomes)["ranks"]
    assert isinstance(lines, list)
    assert len(lines) == 65
    assert "2,936" in str(lines[-1])


def test_a_hang_is_told_in_one_message(golden) -> None:
    finding = only(list(trials.judge(run_of(*WAITING, GUILTY))))
    assert (finding.code, finding.ranks, finding.hosts) == ("RUN003.hung", (2,), ("n1",))
    golden(finding)


def test_a_mismatch_has_a_code_of_its_own(golden) -> None:
    wrong = structs.replace(hung(2, 7), collectives=(collective(7, elements=2),))
    finding = only(list(trials.judge(run_of(*WAITING, wrong))))
    assert (finding.code, finding.ranks, finding.hosts) == ("RUN003.mismatch", (2,), ("n1",))
    golden(finding)


def test_a_mismatch_of_two_ranks_tells_both_sides_and_blames_neither(golden) -> None:
    wrong = structs.replace(hung(1, 7), collectives=(collective(7, elements=2),))
    finding = only(list(trials.judge(run_of(hung(0, 7), wrong, size=2))))
    assert (finding.code, finding.ranks) == ("RUN003.mismatch", ())
    golden(finding)


def test_of_an_output_the_line_is_told_that_says_how_it_ended() -> None:
    traceback = "Traceback:\n  File a, line 1\n    f(x)\n    ^^~~\nValueError: no"
    assert crash_line(traceback) == "ValueError: no"
    assert crash_line("x" * 700) == "x" * 600
    assert crash_line("Fatal Python error: Aborted\n\nThread 0x7f\n  File b\nmodules: c (total: 1)") == (
        "Fatal Python error: Aborted"
    )
    assert crash_line("terminate called\n  what():  CUDA error\nframe #0: d") == "what():  CUDA error"
    assert crash_line("") == ""


def test_what_torch_says_in_healthy_runs_is_no_last_word():
    gloo = "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    numpy = (
        "/site-packages/torch/_subclasses/functional_tensor.py:279: UserWarning: Failed to initialize NumPy: No module "
        "named 'numpy' (Triggered internally at /pytorch/torch/csrc/utils/tensor_numpy.cpp:84.)\n"
        '  cpu = _conversion_method_template(device=torch.device("cpu"))'
    )
    assert crash_line(f"{gloo}\n{numpy}\n") == ""
    assert crash_line(f"terminate called\n{gloo}\n") == "terminate called"
