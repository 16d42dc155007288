"""Rank 0 is lost, and with a shared directory `ddpdiag judge` makes the report; ranks that do not find each other.

Most of it is waiting for silence, so the runs go on at once, also while the first tests run; others look at one each.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import CHECK, Job, Start, by_hand, free_port

SLEEPER = 2
SELECT = ("--select", "LCH003,COL001")
# The start, silence until rank 0 counts as lost, the end of a hung trial, the grace, the report; on a busy machine.
SECONDS = 240
deep = pytest.mark.deep


@dataclass
class Run:
    """Ranks one of which sleeps in its all-reduce, started by hand one by one, or all by one process."""

    shared: Path
    jobs: list[Job]


def _started(start: Start, shared: Path, *, by_one: bool = False) -> Run:
    """Three ranks that share a directory; they come as far as the sleep, and rank 0 has written so there."""
    port, options = free_port(), (*SELECT, "--shared-dir", str(shared))
    one = (*CHECK, "--nproc-per-node", "3", "--json", "{json}", *options)
    commands = [one] if by_one else [by_hand(rank, 3, port, *options) for rank in range(3)]
    run = Run(shared, [start(*command, DDPDIAG_TEST_FAULT=f"sleep {SLEEPER}") for command in commands])
    run.jobs[-1].wait_until(run.jobs[-1].reached.exists)
    word = '"code":"COL001"'  # what rank 0 knew is expected of its successor
    run.jobs[0].wait_until(lambda: any(word in path.read_text() for path in shared.glob("*/run.jsonl")))
    return run


def _kill_and_tell_the_others_to_leave(first: Job, *others: Job) -> None:
    first.process.kill()
    for job in others:
        job.process.send_signal(signal.SIGTERM)


# What happens to rank 0.
WAYS: dict[str, Callable[..., None]] = {
    "killed": lambda first, *_: first.process.kill(),
    "killed by a launcher": _kill_and_tell_the_others_to_leave,
    "frozen": lambda first, *_: first.process.send_signal(signal.SIGSTOP),
    "killed of one process": lambda launcher: launcher.supervisor(0).kill(signal.SIGKILL),
}


@pytest.fixture(scope="module")
def runs(start_shared: Start, tmp_path_factory: pytest.TempPathFactory, selected: frozenset[str]) -> dict[str, Run]:
    """A run for each way that a test will look at."""
    found = {}
    for name in (name for name in WAYS if name in selected):
        found[name] = _started(start_shared, tmp_path_factory.mktemp("shared"), by_one="one process" in name)
        WAYS[name](*found[name].jobs)
    return found


@pytest.fixture(scope="module")
def alone(start_shared: Start) -> Job:
    """A run whose rank 0 was killed, without a shared directory."""
    options = ("--nproc-per-node", "2", *SELECT, "--json", "{json}")
    job = start_shared(*CHECK, *options, DDPDIAG_TEST_FAULT="sleep 1")
    job.wait_until(job.reached.exists)
    job.supervisor(0).kill(signal.SIGKILL)
    return job


@pytest.mark.deep
@pytest.mark.usefixtures("runs", "alone")
def test_a_rank_that_never_comes_is_named(start):
    job = start(*by_hand(0, 2, free_port(), "--join-timeout", "1"))
    assert job.wait() == 3, job.told()
    assert job.report["verdict"] == "unknown"
    assert [(finding["code"], finding["ranks"]) for finding in job.errors] == [("RUN001.absent", [1])]
    assert "rank 1 " in job.report["sentence"]
    assert "1 rank on 1 host; rank 1 " in job.progress[0], job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


@pytest.mark.usefixtures("runs", "alone")
def test_a_rank_that_cannot_reach_rank_0_says_what_it_met(start):
    job = start(*by_hand(1, 2, free_port(), "--join-timeout", "1"))
    assert job.wait() == 3, job.told()
    (sentence,) = job.stderr.splitlines()
    assert sentence.startswith("ddpdiag: rank 1 ")
    assert "refused" in sentence
    assert job.stdout == ""
    job.check_left_nothing()


def test_a_killed_rank_0_is_told_and_the_others_keep_their_records(alone):
    assert alone.wait(SECONDS) == 3, alone.told()
    assert alone.left_processes() == []
    assert alone.reports == 0, "what is not known is not reported"
    assert not alone.has_traceback, alone.told()
    (folder,) = alone.temporary.glob("ddpdiag-*")
    (sentence,) = [line for line in alone.stderr.splitlines() if str(folder / "rank-1.jsonl") in line]
    assert sentence.startswith("ddpdiag: rank 1 ")
    assert "rank 0" in sentence
    assert {path.name for path in folder.iterdir()} <= {"rank-0.jsonl", "rank-1.jsonl"}


def check_judged_without_rank_0(run: Run, *living: Job) -> None:
    """The living ranks say how to judge, the report blames rank 0, and nothing else is left."""
    (folder,) = run.shared.iterdir()
    for job in living:
        assert not job.has_traceback, job.told()
        assert job.reports == 0
        assert f"`ddpdiag judge {folder}` makes the report" in " ".join(job.stderr.split()), job.told()
        job.check_left_nothing()
    judged = subprocess.run(
        [sys.executable, *CHECK[:-1], "judge", str(folder), "--json", "-"], capture_output=True, timeout=60, check=False
    )
    report = json.loads(judged.stdout)
    assert (judged.returncode, report["verdict"], report["exit_code"]) == (1, "unfit", 1)
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert "RUN002.lost" in [finding["code"] for finding in errors]
    assert {rank for finding in errors for rank in finding["ranks"]} == {0}
    assert any(note.startswith("rank 0 was lost") for note in report["recording_problems"]), report[
        "recording_problems"
    ]
    assert next(check["statuses"] for check in report["checks"] if check["code"] == "LCH003") == {"done": 3}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("killed", 3),
        pytest.param("killed by a launcher", 143, marks=deep),
        pytest.param("killed of one process", 3, marks=deep),
    ],
)
def test_living_ranks_say_how_to_judge_a_run_without_rank_0(runs, name, code):
    jobs = runs[name].jobs
    living = jobs[1:] or jobs  # one process, or the ranks but for rank 0
    assert [job.wait(SECONDS) for job in living] == [code] * len(living), [job.told() for job in living]
    check_judged_without_rank_0(runs[name], *living)


@deep
@pytest.mark.parametrize("name", ["frozen"])
def test_a_frozen_rank_0_that_wakes_up_blames_no_rank(runs, name):
    run = runs[name]
    frozen, first, second = run.jobs
    assert [job.wait(SECONDS) for job in (first, second)] == [3, 3], first.told() + second.told()
    check_judged_without_rank_0(run, first, second)
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.wait(SECONDS) == 3, frozen.told()
    assert "rank 0 was stopped for " in frozen.stderr
    assert not frozen.json.exists()
