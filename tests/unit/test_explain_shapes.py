"""Shapes of posted logs: prefixes of any logger, lines that were joined or cut, and ranks that never joined."""

import pytest

from ddpdiag.explain.matcher import Explanation, explain_log
from ddpdiag.explain.render import log_blocks, render

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in main',
    "    client.read(key)",
    '  File "/venv/lib/python3.11/site-packages/etcd/client.py", line 5, in read',
    "    raise error",
    "etcd.EtcdError: no such key",
)
SIGNAL = "Received a dump signal due to a collective timeout from this local rank. Last enqueued NCCL work: 22,\n"
ENDED = "[rank6]:[E a.cpp:1] [PG ID 0 Rank 6] Process group watchdog thread terminated with exception: "
JOINS = "initializing ddp: GLOBAL_RANK: {}, MEMBER: 1/4\n"


def explained(text: str) -> Explanation:
    return explain_log([text.encode()], "job.log")


def lead(found: Explanation) -> str:
    return render(log_blocks(found), width=80, color=False).replace("\n", " ")


@pytest.mark.parametrize(
    "log",
    [
        "\n".join(f"E1106 17:14:53.{n}0000 213 torch/multiprocessing/api.py:732] {x}" for n, x in enumerate(TRACEBACK)),
        "\n".join(f"2026-01-02 10:00:00,12{n} - Tuner - INFO - {line}" for n, line in enumerate(TRACEBACK)),
        "\n".join(f"<trainer {n}> step failed | {line}" for n, line in enumerate(TRACEBACK)),
        "<trainer 3> step failed: Traceback (most recent call last):\n"
        + "\n".join(f"<trainer 4> {line}\nstep 7 of another program" for line in TRACEBACK[1:]),
        "\n".join(f"> {line}" for line in TRACEBACK),
        "\r\n".join(TRACEBACK),
        " 5%|#  |\r" + "\r".join(TRACEBACK),
        " ".join(TRACEBACK),
        "step 1" + " " * 40 + (" " * 60).join(TRACEBACK),
    ],
    ids=["glog", "logging", "any", "words", "quoted", "crlf", "cr", "one-line", "joined"],
)
def test_a_traceback_is_read_whatever_is_before_its_lines(log: str) -> None:
    found = explained(log + "\nstep 2\n")
    (one,) = found.sightings
    assert (one.first.excerpt, one.frame) == (TRACEBACK[-1], "/job/train.py, line 12, in main")


def test_a_rank_that_was_told_of_a_time_out_may_be_the_one_for_which_the_others_wait() -> None:
    lines = [f"[rank{rank}]:[E a.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] " for rank in range(3)]
    observed = "Observed flight recorder dump signal from another rank via TCPStore.\n"
    found = explained(lines[1] + SIGNAL + lines[0] + observed + lines[2] + SIGNAL)
    assert "Start with rank 0: every other rank" in lead(found)


@pytest.mark.parametrize("text", ["", "[Rank 6] ", "[Rank 6] Watchdog", "[Rank 6] Watchdog caught co"])
def test_a_rank_whose_line_is_cut_before_the_reason_is_not_blamed(text: str) -> None:
    (one,) = explained(ENDED + text).sightings
    assert one.card.role.value == "wait"
    assert explained(f"{ENDED}CUDA error").sightings[0].card.role.value == "failure"


@pytest.mark.parametrize(
    ("ranks", "after", "sentence"),
    [
        ((1, 0), "", "Start with ranks 2-3: ranks 0-1 waited for them in vain."),
        ((1, 1, 0, 0), "", "Start with ranks 2-3"),
        ((1, 0, 2, 3), "", "No failure found"),
        ((1, 0), "step 1\n" * 9, "No failure found"),
        ((1, 0), "ValueError: no data\n", "Start with its first unknown failure"),
    ],
)
def test_ranks_that_never_joined_are_named_where_the_log_ends(ranks, after: str, sentence: str) -> None:
    assert sentence in lead(explained("".join(map(JOINS.format, ranks)) + after))


LIBRARY = "RuntimeError: NCCL error in: ../ProcessGroupNCCL.cpp:1333, unhandled cuda error, NCCL version 2.18.1\n"
CALL = "[E a.cpp:1] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE{}"


@pytest.mark.parametrize(
    ("log", "first"),
    [
        # The line that says more leads if it is one of the next ones.
        (f"{LIBRARY}Last error:\nCuda failure 'invalid argument'\n", "nccl-cuda-call"),
        (LIBRARY + "step 1\n" * 9 + "Cuda failure 'invalid argument'\n", "nccl-cuda-error"),
        # A line that is cut shows no other collective, and a name that is cut no exception.
        (CALL.format(0, ", NumelIn=1, N\n") + CALL.format(1, ", Num"), "watchdog"),
        (CALL.format(0, ", NumelIn=1, N\n") + CALL.format(1, "")[:-2], "watchdog"),
        (f"{TRACEBACK[0]}\n{TRACEBACK[1]}\ntorch.distributed.elastic.multip", ""),
        ("RuntimeError: Address already in use", "port-taken"),
    ],
    ids=["detail", "later", "cut-number", "cut-name", "cut-exception", "port"],
)
def test_the_first_text_is_the_one_that_says_most(log: str, first: str) -> None:
    names = [one.card.name for one in explained(log).sightings]
    assert names[:1] == [first][: len(first)]


def test_torchruns_summary_alone_names_the_rank_that_exited_first() -> None:
    table = "".join(
        f"{head}[{n}]:\n  time      : 2026-01-02\n  host      : n{rank}\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : 1 (pid: 7{rank})\n  error_file: <N/A>\n"
        for n, (rank, head) in enumerate(((1, "Failures:\n"), (3, "Root Cause (first observed failure):\n")))
    )
    assert "(rank 3; host n3): torchrun saw it exit first, and no line shows why" in lead(explained(table))


@pytest.mark.parametrize(
    ("log", "names"),
    [
        ("step 1\nring.c:12 Failed to open segment 3\n", ["line-of-failure"]),
        ("step 1\npeer 3 timed out after 120 s\nerror: no segment\n", ["line-of-time-out", "line-of-error"]),
        # Not beside another text, in a healthy logger's lines, or for a metric.
        ("Failed to open segment 3\nCUDA error: out of memory\n", ["cuda-memory-allocation"]),
        ("Failed to open segment 3\nValueError: no data\n", ["exception"]),
        ("2026-01-02 INFO Failed to load plugin, going on\nerror: 0.25\n", []),
        ("*** An error occurred in MPI_Init_thread\n*** on a NULL communicator\n", ["mpi-init"]),
        ("THCudaCheck FAIL file=/t/THCGeneral.cpp line=51 error=3 : initialization error\n", ["cuda-initialisation"]),
        ("[n0:40] PMIX ERROR: ERROR in file gds.c at line 1\n", ["line-with-error"]),
        ("[t] _job_complete: JobId=7 WTERMSIG 9\n", ["slurmctld-signal"]),
        (
            "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via x: Timeout\n",
            ["unique-id-timeout"],
        ),
    ],
    ids=["failure", "two", "known", "exception", "healthy", "mpi", "thc", "mark", "slurmctld", "old-spelling"],
)
def test_a_line_that_speaks_of_a_failure_counts_if_nothing_else_is_known(log: str, names: list[str]) -> None:
    assert [one.card.name for one in explained(log).sightings] == names
