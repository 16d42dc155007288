"""Rank 2 of 3 fails in each way in which ranks fail; it alone is blamed, in time, and nothing stays behind.

Most of a failing run is waiting for its deadline, so all runs are started at once, each when the one before has reached
its fault; the tests then look at one run each.
"""

import json
import signal
from dataclasses import dataclass

import pytest
from jobs import CHECK, Job, Process, Start, processes, torchrun

from ddpdiag.codec import read_recording
from ddpdiag.model import Outcome, Status

RANKS = 3
GUILTY = 2
BUDGET = 40
# The first trial with torch gets what is left of the budget at most, so this is what a hang in its import costs.
IMPORT_BUDGET = 12
# What a hang in the all-reduce costs.
DEADLINE = ("--set", "COL001.deadline_seconds=5")
# The start of the interpreter and of torchrun, and the way out, on a busy machine.
AROUND = 30


@dataclass(frozen=True)
class Failure:
    """What is injected into rank 2, and to which process a signal is sent when it is reached; the error, what its text
    quotes, and what rank 2 had posted in COL001 (elements; None: it could not say; ...: it was not there).
    """

    fault: str
    code: str = ""
    quotes: str = ""
    posted: object = ...
    sent: tuple[str, int, signal.Signals] | None = None
    torchrun: bool = False


FAILURES = {
    "hangs in import torch": Failure("import", "RUN003.hung", "import torch", torchrun=True),
    "frozen rank 0": Failure("sleep", sent=("supervisor", 0, signal.SIGSTOP)),
    "frozen rank 0 under torchrun": Failure("sleep", sent=("supervisor", 0, signal.SIGSTOP), torchrun=True),
    "posts another size": Failure("longer", "RUN003.mismatch", "all_reduce #1 (2 float32, 8 B)", (2,)),
    "holds the GIL": Failure("gil", "RUN003.hung", "connect all ranks: post", None),
    "is stopped": Failure("sleep", "RUN003.hung", "connect all ranks: post", None, ("worker", GUILTY, signal.SIGSTOP)),
    "loses its supervisor": Failure("sleep", "RUN002.lost", sent=("supervisor", GUILTY, signal.SIGKILL)),
    "segfaults": Failure("segv", "RUN003.died", "SIGSEGV", None),
    "raises": Failure("raise", "RUN003.raised", "RuntimeError: injected", ()),
    "raises under torchrun": Failure("raise", "RUN003.raised", "RuntimeError: injected", (), torchrun=True),
    # Last: its stacks have 0.5 s, while no other run imports torch.
    "sleeps": Failure("sleep", "RUN003.hung", "connect all ranks: post", ()),
}
FROZEN = ("frozen rank 0", "frozen rank 0 under torchrun")
QUICK = ("sleeps", "raises under torchrun")
BLAMED = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in FAILURES if name not in FROZEN
]


@pytest.fixture(scope="module")
def runs(start_shared: Start, selected: frozenset[str]) -> dict[str, Job]:
    """A run for each failure that a test will look at."""
    return {name: _started(start_shared, failure) for name, failure in FAILURES.items() if name in selected}


def _started(start: Start, failure: Failure) -> Job:
    budget = IMPORT_BUDGET if failure.fault == "import" else BUDGET
    deadline = DEADLINE if failure.code else ()
    files = ("--json", "{json}", "--record", "{json}l")
    check = (*CHECK, "--select", "LCH003,COL001", "--budget", str(budget), *deadline, *files)
    arguments = (*torchrun(RANKS), *check) if failure.torchrun else (*check, "--nproc-per-node", str(RANKS))
    job = start(*arguments, DDPDIAG_TEST_FAULT=f"{failure.fault} {GUILTY}")
    job.wait_until(job.reached.exists)
    if failure.sent is not None:
        process, rank, number = failure.sent
        getattr(job, process)(rank).kill(number)
    return job


@pytest.mark.parametrize("name", BLAMED)
def test_a_rank_is_blamed_alone_and_in_time_when_it(runs, name):
    job, failure = runs[name], FAILURES[name]
    exit_code = job.wait(BUDGET + AROUND)
    report = job.report
    assert job.blamed == {GUILTY}, job.told()
    assert failure.quotes in next(finding["message"] for finding in job.errors if finding["code"] == failure.code)
    assert (report["verdict"], report["exit_code"], exit_code) == ("unfit", 1, 1)
    assert report["seconds"] <= BUDGET
    assert f"rank {GUILTY}" in report["sentence"]
    assert job.reports == 1
    assert not job.has_traceback, job.told()
    assert not failure.torchrun or report["sentence"] in job.stderr, "torchrun's own summary says why"
    if failure.posted is not ...:
        collectives = _outcomes(job)[GUILTY].collectives
        assert (None if collectives is None else tuple(posted.elements for posted in collectives)) == failure.posted
    job.check_left_nothing()


@pytest.mark.parametrize("name", ["raises under torchrun"])
def test_a_failed_run_is_judged_again_the_same(runs, start, name):
    job = runs[name]
    job.wait(BUDGET + AROUND)
    record = job.json.with_suffix(".jsonl")
    assert all(json.loads(line) for line in record.read_text().splitlines())
    again = start("-m", "ddpdiag", "judge", str(record), "--json", "{json}")
    assert again.wait() == 1, again.told()
    assert again.report == job.report
    assert again.stdout == job.stdout


def _outcomes(job: Job) -> dict[int, Outcome]:
    """How COL001's only trial ended on each rank."""
    recording = read_recording([job.json.with_suffix(".jsonl")])
    outcomes = {outcome.rank: outcome for outcome in recording.outcomes if outcome.code == "COL001"}
    assert set(outcomes) == set(range(RANKS)), job.told()
    return outcomes


@pytest.mark.parametrize("name", ["sleeps"])
def test_the_bundle_of_a_hang_tells_of_every_rank_where_it_stands_and_what_it_posted(runs, name):
    runs[name].wait(BUDGET + AROUND)
    for rank, outcome in _outcomes(runs[name]).items():
        process = outcome.process
        assert outcome.status is Status.HUNG
        assert outcome.last_step == ("connect all ranks: post" if rank == GUILTY else "connect all ranks: wait")
        assert process is not None
        assert process.state in ("S", "R")
        assert any(frame.startswith("connect (collectives.py:") for frame in process.stack), process.stack
        assert not any("hang_evidence.py" in frame for thread in process.threads for frame in thread)
        posted = [(c.seq, c.name, c.elements) for c in outcome.collectives or ()]
        assert posted == ([] if rank == GUILTY else [(1, "gloo:all_reduce", 1)])
    waiting = next(line for line in runs[name].errors[0]["evidence"]["ranks"] if line.startswith("ranks 0-1: "))
    assert "all_reduce #1" in waiting


@pytest.mark.deep
@pytest.mark.parametrize(("name", "state"), [("holds the GIL", "S"), ("is stopped", "T")])
def test_a_rank_that_cannot_answer_has_a_stack_and_no_collectives(runs, name, state):
    runs[name].wait(BUDGET + AROUND)
    outcomes = _outcomes(runs[name])
    process = outcomes[GUILTY].process
    assert process is not None
    assert process.state == state
    assert process.stack
    assert all(outcome.collectives for rank, outcome in outcomes.items() if rank != GUILTY)


@pytest.mark.deep
@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_rank_0_leaves_the_others_with_their_records(runs, start, name):
    job = runs[name]
    if FAILURES[name].torchrun:
        # torchrun would do this 30 s after the others have left, whatever its --shutdown-timeout says (torch 2.13).
        job.wait_until(lambda: len(_supervisors(job)) <= 1, 60)
        for frozen in _supervisors(job):
            frozen.kill(signal.SIGKILL)
    assert job.wait(90) == (1 if FAILURES[name].torchrun else 3)
    assert job.left_processes() == []
    assert not job.has_traceback, job.told()
    assert job.reports == 0, "what is not known is not reported"
    (folder,) = job.temporary.glob("ddpdiag-*")
    assert {path.name for path in folder.iterdir()} == {f"rank-{rank}.jsonl" for rank in range(RANKS)}
    records = [folder / f"rank-{rank}.jsonl" for rank in range(1, RANKS)]
    for rank, path in enumerate(records, 1):
        (sentence,) = [line for line in job.stderr.splitlines() if line.startswith(f"ddpdiag: rank {rank} ")]
        assert "rank 0" in sentence
        assert str(path) in sentence
        assert path.stat().st_mode & 0o777 == 0o600
        assert all(json.loads(line) for line in path.read_text().splitlines())
    judged = start("-m", "ddpdiag", "judge", *map(str, records), "--json", "{json}")
    assert judged.wait() in (1, 3), judged.told()
    assert judged.report["verdict"] in ("unknown", "unfit")
    assert not judged.blamed & {1}


def _supervisors(job: Job) -> list[Process]:
    return [p for p in processes(job.mark) if "-m ddpdiag check" in p.command and "RANK" in p.environ]
