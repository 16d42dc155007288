"""Rank 2 of 3 fails in each way in which ranks fail; it alone is blamed, in time, and nothing stays behind.

Most of a failing run is waiting for its deadline, so all runs are started at once, each when the one before has reached
its fault; the tests then look at one run each.
"""

import json
import signal
from collections.abc import Callable, Mapping

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
# The start of the interpreter and of torchrun, and the way out, with other runs beside this one on two cores.
AROUND = 12


def _nothing(_job: Job) -> None:
    """The injected fault is all."""


def _stop_worker(job: Job) -> None:
    job.worker(GUILTY).kill(signal.SIGSTOP)


def _kill_supervisor(job: Job) -> None:
    job.supervisor(GUILTY).kill(signal.SIGKILL)


def _freeze_rank_0(job: Job) -> None:
    job.supervisor(0).kill(signal.SIGSTOP)


# What is injected into rank 2, and what happens to the run when the fault is reached.
FAULTS: Mapping[str, tuple[str, Callable[[Job], None]]] = {
    "hangs in import torch": ("import", _nothing),
    "frozen rank 0": ("sleep", _freeze_rank_0),
    "sleeps": ("sleep", _nothing),
    "holds the GIL": ("gil", _nothing),
    "is stopped": ("sleep", _stop_worker),
    "loses its supervisor": ("sleep", _kill_supervisor),
    "segfaults": ("segv", _nothing),
    "raises": ("raise", _nothing),
    "posts another size": ("longer", _nothing),
}


# What differs under torchrun; the gallery of faults has more.
UNDER_TORCHRUN = ("frozen rank 0", "raises")


@pytest.fixture(scope="module")
def runs(start_shared: Start) -> dict[str, Job]:
    """A run for each fault."""
    return {name: _started(start_shared, "standalone", name) for name in FAULTS}


@pytest.fixture(scope="module")
def torchrun_runs(start_shared: Start) -> dict[str, Job]:
    """The same under torchrun."""
    return {name: _started(start_shared, "torchrun", name) for name in UNDER_TORCHRUN}


def _started(start: Start, launcher: str, name: str) -> Job:
    fault, act = FAULTS[name]
    budget = IMPORT_BUDGET if fault == "import" else BUDGET
    deadline = () if act is _freeze_rank_0 else DEADLINE
    files = ("--json", "{json}", "--record", "{json}l")
    check = (*CHECK, "--select", "LCH003,COL001", "--budget", str(budget), *deadline, *files)
    arguments = (*torchrun(RANKS), *check) if launcher == "torchrun" else (*check, "--nproc-per-node", str(RANKS))
    job = start(*arguments, DDPDIAG_TEST_FAULT=f"{fault} {GUILTY}")
    job.wait_until(job.reached.exists)
    act(job)
    return job


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raises", "RUN003.raised", "RuntimeError: injected"),
        ("posts another size", "RUN003.mismatch", "posted all_reduce #1 (2 Float elements)"),
        ("segfaults", "RUN003.died", "killed by SIGSEGV"),
        ("sleeps", "RUN003.hung", "did not reach the step"),
        ("holds the GIL", "RUN003.hung", "did not reach the step"),
        ("is stopped", "RUN003.hung", "its process is stopped"),
        ("loses its supervisor", "RUN002.lost", "rank 2"),
        ("hangs in import torch", "RUN003.hung", "import torch"),
    ],
)
def test_a_rank_is_blamed_alone_and_in_time_when_it(runs, name, code, words):
    check_blamed_alone(runs[name], code, words)


def test_a_rank_is_blamed_alone_under_torchrun_which_says_why(torchrun_runs):
    job = torchrun_runs["raises"]
    check_blamed_alone(job, "RUN003.raised", "RuntimeError: injected")
    assert job.report["sentence"] in job.stderr


def check_blamed_alone(job: Job, code: str, words: str) -> None:
    exit_code = job.wait(BUDGET + AROUND)
    report = job.report
    assert job.blamed == {GUILTY}, job.told()
    assert words in next(finding["message"] for finding in job.errors if finding["code"] == code)
    assert (report["verdict"], report["exit_code"], exit_code) == ("unfit", 1, 1)
    assert report["seconds"] <= BUDGET
    assert f"rank {GUILTY}" in report["sentence"]
    assert job.reports == 1
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_the_bundle_of_a_hang_tells_of_every_rank_where_it_stands_and_what_it_posted(runs):
    outcomes = _outcomes(runs["sleeps"])
    for rank, outcome in outcomes.items():
        process = outcome.process
        assert outcome.status is Status.HUNG
        assert outcome.at == ("connect all ranks: post" if rank == GUILTY else "connect all ranks: wait")
        assert process is not None
        assert process.state in ("S", "R")
        assert any(frame.startswith("connect (collectives.py:") for frame in process.stack), process.stack
        assert not any("witness.py" in frame for thread in process.threads for frame in thread)
        posted = outcome.flight if rank == GUILTY else [(c.seq, c.name, c.elements) for c in outcome.flight or ()]
        assert posted == (() if rank == GUILTY else [(1, "gloo:all_reduce", 1)])
    assert "Ranks 0-1 wait for it in all_reduce #1" in runs["sleeps"].errors[0]["message"]


@pytest.mark.parametrize("name", ["holds the GIL", "is stopped"])
def test_a_rank_that_cannot_answer_has_a_stack_and_no_collectives(runs, name):
    outcomes = _outcomes(runs[name])
    assert outcomes[GUILTY].flight is None
    assert outcomes[GUILTY].process is not None
    assert outcomes[GUILTY].process.stack
    assert all(outcome.flight for rank, outcome in outcomes.items() if rank != GUILTY)


def test_a_rank_that_raises_says_what_it_had_posted(runs):
    assert _outcomes(runs["raises"])[GUILTY].flight == ()


def _outcomes(job: Job) -> dict[int, Outcome]:
    """How COL001's only trial ended on each rank."""
    job.wait(BUDGET + AROUND)
    recording = read_recording([job.json.with_suffix(".jsonl")])
    outcomes = {outcome.rank: outcome for outcome in recording.outcomes if outcome.code == "COL001"}
    assert set(outcomes) == set(range(RANKS)), job.told()
    return outcomes


def test_a_frozen_rank_0_leaves_the_others_with_their_records(runs, start):
    job = runs["frozen rank 0"]
    assert job.wait(60) == 3
    check_records_are_kept(job, start)


def test_a_frozen_rank_0_leaves_the_others_with_their_records_under_torchrun(torchrun_runs, start):
    job = torchrun_runs["frozen rank 0"]
    # torchrun would do this 30 s after the others have left, whatever its --shutdown-timeout says (torch 2.13).
    job.wait_until(lambda: len(_supervisors(job)) <= 1)
    for frozen in _supervisors(job):
        frozen.kill(signal.SIGKILL)
    assert job.wait(60) == 1
    check_records_are_kept(job, start)


def check_records_are_kept(job: Job, start: Start) -> None:
    assert job.left_processes() == []
    assert not job.has_traceback, job.told()
    assert job.reports == 0, "what is not known is not reported"
    (folder,) = job.temporary.glob("ddpdiag-*")
    assert {path.name for path in folder.iterdir()} == {f"rank-{rank}.jsonl" for rank in range(RANKS)}
    records = [folder / f"rank-{rank}.jsonl" for rank in range(1, RANKS)]
    for rank, path in enumerate(records, 1):
        (sentence,) = [line for line in job.stderr.splitlines() if line.startswith(f"ddpdiag: rank {rank} ")]
        assert "lost rank 0" in sentence
        assert str(path) in sentence
        assert path.stat().st_mode & 0o777 == 0o600
        assert all(json.loads(line) for line in path.read_text().splitlines())
    judged = start("-m", "ddpdiag", "judge", *map(str, records), "--json", "{json}")
    assert judged.wait() in (1, 3), judged.told()
    assert judged.report["verdict"] in ("unknown", "unfit")
    assert not judged.blamed & {1}


def _supervisors(job: Job) -> list[Process]:
    return [p for p in processes(job.mark) if "-m ddpdiag check" in p.command and "RANK" in p.environ]
