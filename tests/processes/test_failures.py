"""Rank 2 of 4 fails in each way in which ranks fail; it alone is blamed, in time, and nothing stays behind.

Most of a failing run is waiting for its deadline, so all runs are started at once, each when the one before has reached
its fault; the tests then look at one run each.
"""

import json
import signal
from collections.abc import Callable, Mapping

import pytest
from jobs import CHECK, Job, Process, Start, processes, torchrun

RANKS = 4
GUILTY = 2
# A trial gets what is left of the budget at most, so this is what a hang costs.
BUDGET = 12
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
    "frozen rank 0": ("sleep", _freeze_rank_0),
    "sleeps": ("sleep", _nothing),
    "holds the GIL": ("gil", _nothing),
    "is stopped": ("sleep", _stop_worker),
    "loses its supervisor": ("sleep", _kill_supervisor),
    "segfaults": ("segv", _nothing),
    "raises": ("raise", _nothing),
    "hangs in import torch": ("import", _nothing),
}


@pytest.fixture(scope="module", params=["standalone", "torchrun"])
def launcher(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(launcher: str, start_shared: Start) -> dict[str, Job]:
    """A run for each fault."""
    return {name: _started(start_shared, launcher, name) for name in FAULTS}


def _started(start: Start, launcher: str, name: str) -> Job:
    fault, act = FAULTS[name]
    budget = 60 if act is _freeze_rank_0 else BUDGET
    check = (*CHECK, "--select", "LCH003", "--select", "COL001", "--budget", str(budget), "--json", "{json}")
    arguments = (*torchrun(RANKS), *check) if launcher == "torchrun" else (*check, "--nproc-per-node", str(RANKS))
    job = start(*arguments, DDPDIAG_TEST_FAULT=f"{fault} {GUILTY}")
    job.wait_until(job.reached.exists)
    act(job)
    return job


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raises", "RUN003.raised", "RuntimeError: injected"),
        ("segfaults", "RUN003.died", "killed by SIGSEGV"),
        ("sleeps", "RUN003.hung", "did not reach the step"),
        ("holds the GIL", "RUN003.hung", "did not reach the step"),
        ("is stopped", "RUN003.hung", "its process is stopped"),
        ("loses its supervisor", "RUN002.lost", "rank 2"),
        ("hangs in import torch", "RUN003.hung", "import torch"),
    ],
)
def test_a_rank_is_blamed_alone_and_in_time_when_it(runs, launcher, name, code, words):
    job = runs[name]
    exit_code = job.wait(BUDGET + AROUND)
    report = job.report
    assert job.blamed == {GUILTY}, job.told()
    assert words in next(finding["message"] for finding in job.errors if finding["code"] == code)
    assert (report["verdict"], report["exit_code"], exit_code) == ("unfit", 1, 1)
    assert report["seconds"] <= BUDGET
    assert f"rank {GUILTY}" in report["sentence"]
    assert job.reports == 1
    assert not job.has_traceback, job.told()
    if launcher == "torchrun":
        assert report["sentence"] in job.stderr, "torchrun's own summary says why"
    job.check_left_nothing()


def test_a_frozen_rank_0_leaves_the_others_with_their_records(runs, launcher, start):
    job = runs["frozen rank 0"]
    if launcher == "torchrun":
        # torchrun would do this 30 s after the others have left, whatever its --shutdown-timeout says (torch 2.13).
        job.wait_until(lambda: len(_supervisors(job)) <= 1)
        for frozen in _supervisors(job):
            frozen.kill(signal.SIGKILL)
    assert job.wait(60) == (3 if launcher == "standalone" else 1)
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
    assert not judged.blamed & {1, 3}


def _supervisors(job: Job) -> list[Process]:
    return [p for p in processes(job.mark) if "-m ddpdiag check" in p.command and "RANK" in p.environ]
