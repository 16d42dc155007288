"""Rank 0 is lost, and with a shared directory the others report in its place; ranks that do not find each other."""

import os
import signal

import pytest
from jobs import CHECK, Job, free_port

SLEEPER = 2
BUDGET = 60
# Silence until rank 0 counts as lost, the end of a hung trial, the grace, the report; with other runs beside this one.
LOSS_SECONDS = 45


def by_hand(rank: int, size: int, port: int, *options: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    place = ("--rank", str(rank), "--world-size", str(size), "--master-addr", address, "--master-port", str(port))
    return (*CHECK, *place, "--json", "{json}", *options)


@pytest.fixture
def shared(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def ranks(start, shared) -> list[Job]:
    """Three ranks, started by hand, one of which sleeps in its all-reduce."""
    port = free_port()
    checks = ("--select", "LCH003,COL001", "--budget", str(BUDGET), "--shared-dir", str(shared))
    hosts = ("--exclude-file", "bad", "--good-hosts", "good")
    jobs = [start(*by_hand(rank, 3, port, *checks, *hosts), DDPDIAG_TEST_FAULT=f"sleep {SLEEPER}") for rank in range(3)]
    jobs[SLEEPER].wait_until(jobs[SLEEPER].reached.exists)
    # Rank 0 writes to the shared directory a little later, and what it knew is expected of its successor.
    jobs[0].wait_until(lambda: any('"code":"COL001"' in path.read_text() for path in shared.glob("*/run.jsonl")))
    return jobs


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


def test_the_lowest_living_rank_reports_when_rank_0_is_killed(ranks, shared):
    ranks[0].process.kill()
    assert [job.wait(BUDGET + LOSS_SECONDS) for job in ranks[1:]] == [1, 1], ranks[1].told() + ranks[2].told()
    check_reported_without_rank_0(ranks[1])
    assert not ranks[2].json.exists()
    assert ranks[1].report["sentence"] in " ".join(ranks[2].stderr.split())
    assert ranks[1].blamed == {0}
    check_left_nothing(shared, *ranks[1:])


def test_the_next_one_reports_when_the_successor_is_killed_too(ranks, shared):
    ranks[0].process.kill()
    ranks[1].wait_until(lambda: list(shared.glob("*/heir-1")))
    ranks[1].process.kill()
    assert ranks[2].wait(BUDGET + LOSS_SECONDS) == 1, ranks[2].told()
    check_reported_without_rank_0(ranks[2])
    check_left_nothing(shared, ranks[2])


def test_a_launcher_that_ends_the_job_because_of_rank_0_does_not_end_the_report(ranks, shared):
    ranks[0].process.kill()
    for job in ranks[1:]:
        job.process.send_signal(signal.SIGTERM)
    assert [job.wait(BUDGET) for job in ranks[1:]] == [1, 1], ranks[1].told() + ranks[2].told()
    check_reported_without_rank_0(ranks[1])
    assert ranks[1].blamed == {0}
    check_left_nothing(shared, *ranks[1:])


def test_a_frozen_rank_0_that_wakes_up_does_not_report_once_more(ranks, shared):
    ranks[0].process.send_signal(signal.SIGSTOP)
    assert [job.wait(BUDGET + LOSS_SECONDS) for job in ranks[1:]] == [1, 1], ranks[1].told() + ranks[2].told()
    ranks[0].process.send_signal(signal.SIGCONT)
    assert ranks[0].wait(BUDGET + LOSS_SECONDS) == 3, ranks[0].told()
    assert "in its place" in ranks[0].stderr
    assert not ranks[0].json.exists()
    check_left_nothing(shared, *ranks[1:])


def test_ranks_of_one_process_report_without_rank_0(start, shared):
    options = ("--nproc-per-node", "3", "--select", "LCH003,COL001", "--shared-dir", str(shared), "--json", "{json}")
    job = start(
        *CHECK, *options, "--exclude-file", "bad", "--good-hosts", "good", DDPDIAG_TEST_FAULT=f"sleep {SLEEPER}"
    )
    job.wait_until(job.reached.exists)
    job.supervisor(0).kill(signal.SIGKILL)
    assert job.wait(BUDGET + LOSS_SECONDS) == 1, job.told()
    check_reported_without_rank_0(job)
    assert list(shared.iterdir()) == []


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
