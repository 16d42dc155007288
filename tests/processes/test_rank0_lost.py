"""Rank 0 is lost, and with a shared directory the others report in its place; ranks that do not find each other.

Most of it is waiting for silence, so the runs go on at once, and the tests look at one each.
"""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import CHECK, Job, Start, free_port

SLEEPER = 2
BUDGET = 60
# Silence until rank 0 counts as lost, the end of a hung trial, the grace, the report; with other runs beside this one.
LOSS_SECONDS = 60
START_SECONDS = 60
HOSTS = ("--exclude-file", "bad", "--good-hosts", "good")


def by_hand(rank: int, size: int, port: int, *options: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    place = ("--rank", str(rank), "--world-size", str(size), "--master-addr", address, "--master-port", str(port))
    return (*CHECK, *place, "--json", "{json}", *options)


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@dataclass
class Run:
    """Three ranks, one of which sleeps in its all-reduce, started by hand one by one, or all by one process."""

    shared: Path
    jobs: list[Job]

    def wait_until_asleep(self) -> None:
        """Rank 0 writes to the shared directory a little later, and what it knew is expected of its successor."""
        self.jobs[-1].wait_until(self.jobs[-1].reached.exists, START_SECONDS)
        word = '"code":"COL001"'
        self.jobs[0].wait_until(
            lambda: any(word in path.read_text() for path in self.shared.glob("*/run.jsonl")), START_SECONDS
        )


def _started(start: Start, shared: Path) -> Run:
    port = free_port()
    shared.mkdir()
    checks = ("--select", "LCH003,COL001", "--budget", str(BUDGET), "--shared-dir", str(shared))
    fault = f"sleep {SLEEPER}"
    return Run(shared, [start(*by_hand(r, 3, port, *checks, *HOSTS), DDPDIAG_TEST_FAULT=fault) for r in range(3)])


def _started_by_one(start: Start, shared: Path) -> Run:
    shared.mkdir()
    options = ("--nproc-per-node", "3", "--select", "LCH003,COL001", "--shared-dir", str(shared), "--json", "{json}")
    return Run(shared, [start(*CHECK, *options, *HOSTS, DDPDIAG_TEST_FAULT=f"sleep {SLEEPER}")])


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
WAYS: Mapping[str, tuple[Callable[[Start, Path], Run], Callable[[Run], None]]] = {
    "killed": (_started, _kill),
    "killed by a launcher": (_started, _kill_and_tell_the_others_to_leave),
    "frozen": (_started, _freeze),
    "killed of one process": (_started_by_one, _kill_one_of_the_process),
    "killed, and its successor": (_started, _kill),
}


@pytest.fixture(scope="module")
def runs(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run for each way."""
    folder, found = tmp_path_factory.mktemp("shared"), {}
    for number, (name, (started, act)) in enumerate(WAYS.items()):
        found[name] = started(start_shared, folder / str(number))
        found[name].wait_until_asleep()
        act(found[name])
    return found


def check_reported_without_rank_0(job: Job) -> None:
    """The report of the rank in rank 0's place."""
    report = job.report
    assert (report["verdict"], report["exit_code"]) == ("unfit", 1), job.told()
    assert job.reports == 1
    assert 0 in job.blamed
    assert "RUN002.lost" in [finding["code"] for finding in job.errors]
    assert "in its place" in " ".join(report["notes"])
    node = report["world"]["nodes"][0]
    assert (job.folder / "bad").read_text() == f"{node}\n"
    assert (job.folder / "good").read_text() == ""
    assert next(check["statuses"] for check in report["checks"] if check["code"] == "LCH003") == {"done": 3}


def check_left_nothing(shared, *jobs: Job) -> None:
    for job in jobs:
        assert not job.has_traceback, job.told()
        job.check_left_nothing()
    assert list(shared.iterdir()) == []


def test_the_next_one_reports_when_the_successor_is_killed_too(runs):
    run = runs["killed, and its successor"]
    _, first, second = run.jobs
    first.wait_until(lambda: list(run.shared.glob("*/heir-1")))
    first.process.kill()
    assert second.wait(BUDGET + LOSS_SECONDS) == 1, second.told()
    check_reported_without_rank_0(second)
    check_left_nothing(run.shared, second)


def test_the_lowest_living_rank_reports_when_rank_0_is_killed(runs):
    run = runs["killed"]
    _, first, second = run.jobs
    assert [job.wait(BUDGET + LOSS_SECONDS) for job in (first, second)] == [1, 1], first.told() + second.told()
    check_reported_without_rank_0(first)
    assert not second.json.exists()
    assert first.report["sentence"] in " ".join(second.stderr.split())
    assert first.blamed == {0}
    check_left_nothing(run.shared, first, second)


def test_a_launcher_that_ends_the_job_because_of_rank_0_does_not_end_the_report(runs):
    run = runs["killed by a launcher"]
    _, first, second = run.jobs
    assert [job.wait(BUDGET) for job in (first, second)] == [1, 1], first.told() + second.told()
    check_reported_without_rank_0(first)
    assert first.blamed == {0}
    check_left_nothing(run.shared, first, second)


def test_a_frozen_rank_0_that_wakes_up_does_not_report_once_more(runs):
    run = runs["frozen"]
    frozen, first, second = run.jobs
    assert [job.wait(BUDGET + LOSS_SECONDS) for job in (first, second)] == [1, 1], first.told() + second.told()
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.wait(BUDGET + LOSS_SECONDS) == 3, frozen.told()
    assert "in its place" in frozen.stderr
    assert not frozen.json.exists()
    check_left_nothing(run.shared, first, second)


def test_ranks_of_one_process_report_without_rank_0(runs):
    run = runs["killed of one process"]
    assert run.jobs[0].wait(BUDGET + LOSS_SECONDS) == 1, run.jobs[0].told()
    check_reported_without_rank_0(run.jobs[0])
    assert list(run.shared.iterdir()) == []


def test_nothing_stays_in_the_shared_directory_of_a_healthy_run(start, shared):
    job = start(*CHECK, "--nproc-per-node", "2", "--select", "COL001", "--shared-dir", str(shared), "--json", "{json}")
    assert job.wait() == 0, job.told()
    check_left_nothing(shared, job)


def test_shells_that_spell_the_coordinator_differently_meet(start):
    port = free_port()
    jobs = [
        start(*by_hand(rank, 2, port, "--select", "COL001", address=address))
        for rank, address in enumerate(("localhost", "127.0.0.1"))
    ]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].told()
    assert jobs[0].report["verdict"] == "fit"


def test_a_wrong_world_size_is_told_and_nothing_else(start):
    port = free_port()
    jobs = [start(*by_hand(rank, size, port, "--select", "LCH001,COL001")) for rank, size in enumerate((3, 3, 4))]
    assert [job.wait() for job in jobs] == [1, 1, 1], jobs[0].told()
    (finding,) = jobs[0].errors
    assert (finding["code"], finding["ranks"]) == ("LCH001.world-size", [2])
    assert "ranks 0-1: 3; rank 2: 4" in finding["message"]


def test_an_absent_rank_tells_rank_0_what_it_met_over_the_shared_directory(start, shared):
    port, wait = free_port(), ("--shared-dir", str(shared), "--board-wait", "6", "--select", "COL001")
    first = start(*by_hand(0, 2, port, *wait, "--board-port", str(free_port())))
    second = start(*by_hand(1, 2, port, *wait, "--board-port", str(free_port())))
    assert [first.wait(), second.wait()] == [3, 3], first.told()
    (finding,) = first.errors
    assert finding["code"] == "RUN001.absent"
    (note,) = finding["evidence"]["notes"]
    assert note.startswith("rank 1 on ")
    assert "refused" in note
    assert finding["nodes"] == [os.uname().nodename]
    check_left_nothing(shared, first, second)
