"""Rank 0 is lost, and with a shared directory the others report in its place; ranks that do not find each other.

Most of it is waiting for silence, so the runs go on at once, also while the first tests run; others look at one each.
"""

import os
import re
import signal
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
    port, options = free_port(), (*SELECT, "--shared-dir", str(shared), "--exclude-file", "bad", "--good-hosts", "good")
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


@pytest.fixture(scope="module")
def apart(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks that do not find each other; rank 0 waits longer, and so hears of it."""
    shared, port = tmp_path_factory.mktemp("shared"), free_port()
    options = ("--shared-dir", str(shared), "--select", "LCH001")
    commands = [
        by_hand(rank, 2, port, *options, "--board-wait", wait, "--board-port", str(free_port()))
        for rank, wait in ((0, "10"), (1, "2"))
    ]
    # With a token they look for each other at their own ports only, as ranks of several hosts do.
    return Run(shared, [start_shared(*command, DDPDIAG_TOKEN="a secret") for command in commands])


@pytest.mark.usefixtures("apart", "runs", "alone")
def test_a_rank_that_never_comes_is_named(start):
    job = start(*by_hand(0, 2, free_port(), "--board-wait", "1"))
    assert job.wait() == 3, job.told()
    assert job.report["verdict"] == "unknown"
    assert [(finding["code"], finding["ranks"]) for finding in job.errors] == [("RUN001.absent", [1])]
    assert "rank 1 " in job.report["sentence"]
    assert "1 rank on 1 host; rank 1 " in job.progress[0], job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()


def test_a_rank_that_cannot_reach_rank_0_says_what_it_met(start):
    job = start(*by_hand(1, 2, free_port(), "--board-wait", "1"))
    assert job.wait() == 3, job.told()
    (sentence,) = job.stderr.splitlines()
    assert sentence.startswith("ddpdiag: rank 1 ")
    assert "refused" in sentence
    assert job.stdout == ""
    job.check_left_nothing()


def test_an_absent_rank_tells_rank_0_what_it_met_over_the_shared_directory(apart):
    assert [job.wait(SECONDS) for job in apart.jobs] == [3, 3], apart.jobs[0].told()
    (finding,) = apart.jobs[0].errors
    assert (finding["code"], finding["nodes"]) == ("RUN001.absent", [os.uname().nodename])
    (note,) = finding["evidence"]["notes"]
    assert note.startswith("rank 1 on ")
    assert "refused" in note
    check_left_nothing(apart.shared, *apart.jobs)


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


def check_reported_without_rank_0(shared: Path, reporter: Job, *others: Job) -> None:
    """The report of the rank in rank 0's place, and that nothing else is left."""
    report = reporter.report
    assert (report["verdict"], report["exit_code"]) == ("unfit", 1), reporter.told()
    assert reporter.reports == 1
    assert 0 in reporter.blamed
    assert "RUN002.lost" in [finding["code"] for finding in reporter.errors]
    assert any(re.match("rank 0 .*: rank [12] on ", note) for note in report["notes"]), report["notes"]
    node = report["world"]["nodes"][0]
    assert (reporter.folder / "bad").read_text() == f"{node}\n"
    assert (reporter.folder / "good").read_text() == ""
    assert next(check["statuses"] for check in report["checks"] if check["code"] == "LCH003") == {"done": 3}
    check_left_nothing(shared, reporter, *others)


def check_left_nothing(shared: Path, *jobs: Job) -> None:
    for job in jobs:
        assert not job.has_traceback, job.told()
        job.check_left_nothing()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("name", ["killed", pytest.param("killed by a launcher", marks=deep)])
def test_the_lowest_living_rank_reports_and_the_others_know_its_verdict(runs, name):
    run = runs[name]
    _, first, second = run.jobs
    assert [job.wait(SECONDS) for job in (first, second)] == [1, 1], first.told() + second.told()
    check_reported_without_rank_0(run.shared, first, second)
    assert not second.json.exists()
    assert name != "killed" or first.report["sentence"] in " ".join(second.stderr.split())
    assert first.blamed == {0}


@deep
@pytest.mark.parametrize("name", ["frozen"])
def test_a_frozen_rank_0_that_wakes_up_does_not_report_once_more(runs, name):
    run = runs[name]
    frozen, first, second = run.jobs
    assert [job.wait(SECONDS) for job in (first, second)] == [1, 1], first.told() + second.told()
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.wait(SECONDS) == 3, frozen.told()
    (sentence,) = [line for line in frozen.stderr.splitlines() if "rank 0" in line]
    assert sentence.startswith("ddpdiag: ")
    assert not frozen.json.exists()
    check_reported_without_rank_0(run.shared, first, second)


@deep
@pytest.mark.parametrize("name", ["killed of one process"])
def test_ranks_of_one_process_report_without_rank_0(runs, name):
    run = runs[name]
    assert run.jobs[0].wait(SECONDS) == 1, run.jobs[0].told()
    check_reported_without_rank_0(run.shared, run.jobs[0])


@deep
def test_the_next_one_reports_when_the_successor_is_killed_too(start, tmp_path):
    (shared := tmp_path / "shared").mkdir()
    run = _started(start, shared)
    lost, first, second = run.jobs
    lost.process.kill()
    first.wait_until(lambda: list(run.shared.glob("*/candidate-1")), SECONDS)
    first.process.kill()
    assert second.wait(SECONDS) == 1, second.told()
    check_reported_without_rank_0(run.shared, second)
