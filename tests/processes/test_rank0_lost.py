"""Rank 0 is lost, and with a shared directory the others report in its place.

Most of it is waiting for silence, so the runs go on at once, and the tests look at one each.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import CHECK, Job, Start, free_port

SLEEPER = 2
# The start, silence until rank 0 counts as lost, the end of a hung trial, the grace, the report; on a busy machine.
SECONDS = 180
HOSTS = ("--exclude-file", "bad", "--good-hosts", "good")


@dataclass
class Run:
    """Three ranks, one of which sleeps in its all-reduce, started by hand one by one, or all by one process."""

    shared: Path
    jobs: list[Job]

    def wait_until_asleep(self) -> None:
        """Rank 0 writes to the shared directory a little later, and what it knew is expected of its successor."""
        self.jobs[-1].wait_until(self.jobs[-1].reached.exists)
        word = '"code":"COL001"'
        self.jobs[0].wait_until(lambda: any(word in path.read_text() for path in self.shared.glob("*/run.jsonl")))


def _kill(run: Run) -> None:
    run.jobs[0].process.kill()


def _kill_and_tell_the_others_to_leave(run: Run) -> None:
    run.jobs[0].process.kill()
    for job in run.jobs[1:]:
        job.process.send_signal(signal.SIGTERM)


def _freeze(run: Run) -> None:
    run.jobs[0].process.send_signal(signal.SIGSTOP)


def _kill_one_of_the_process(run: Run) -> None:
    run.jobs[0].supervisor(0).kill(signal.SIGKILL)


# What happens to rank 0. The test of the last one must act in time, and is the first.
WAYS: dict[str, Callable[[Run], None]] = {
    "killed": _kill,
    "killed by a launcher": _kill_and_tell_the_others_to_leave,
    "frozen": _freeze,
    "killed of one process": _kill_one_of_the_process,
    "killed, and its successor": _kill,
}


@pytest.fixture(scope="module")
def runs(start_shared: Start, tmp_path_factory: pytest.TempPathFactory, selected: frozenset[str]) -> dict[str, Run]:
    """A run for each way that a test will look at."""
    found = {}
    for name in (name for name in WAYS if name in selected):
        found[name] = _started(start_shared, tmp_path_factory.mktemp("shared"), by_one="one process" in name)
        found[name].wait_until_asleep()
        WAYS[name](found[name])
    return found


def _started(start: Start, shared: Path, *, by_one: bool) -> Run:
    options = ("--select", "LCH003,COL001", "--shared-dir", str(shared), "--json", "{json}")
    place = ("--world-size", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    places = [("--nproc-per-node", "3")] if by_one else [("--rank", str(rank), *place) for rank in range(3)]
    fault = f"sleep {SLEEPER}"
    return Run(shared, [start(*CHECK, *own, *options, *HOSTS, DDPDIAG_TEST_FAULT=fault) for own in places])


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
    for job in (reporter, *others):
        assert not job.has_traceback, job.told()
        job.check_left_nothing()
    assert list(shared.iterdir()) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", ["killed, and its successor"])
def test_the_next_one_reports_when_the_successor_is_killed_too(runs, name):
    run = runs[name]
    _, first, second = run.jobs
    first.wait_until(lambda: list(run.shared.glob("*/heir-1")), 90)
    first.process.kill()
    assert second.wait(SECONDS) == 1, second.told()
    check_reported_without_rank_0(run.shared, second)


@pytest.mark.parametrize("name", ["killed", pytest.param("killed by a launcher", marks=pytest.mark.deep)])
def test_the_lowest_living_rank_reports_and_the_others_know_its_verdict(runs, name):
    run = runs[name]
    _, first, second = run.jobs
    assert [job.wait(SECONDS) for job in (first, second)] == [1, 1], first.told() + second.told()
    check_reported_without_rank_0(run.shared, first, second)
    assert not second.json.exists()
    assert name != "killed" or first.report["sentence"] in " ".join(second.stderr.split())
    assert first.blamed == {0}


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.parametrize("name", ["killed of one process"])
def test_ranks_of_one_process_report_without_rank_0(runs, name):
    run = runs[name]
    assert run.jobs[0].wait(SECONDS) == 1, run.jobs[0].told()
    check_reported_without_rank_0(run.shared, run.jobs[0])
