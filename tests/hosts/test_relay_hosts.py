"""Ranks of a host that share one connection to rank 0: a fault of the rank that has it is blamed on that rank alone."""

import signal
from collections.abc import Callable

import pytest
from jobs import Process, accused
from launch import Bed, Launched, Launcher, launch, report_of

pytestmark = pytest.mark.hosts

CHECK = ("-m", "ddpdiag", "check", "--select", "LCH003,COL001", "--budget", "120", "--json", "{json}")
# As worlds of more than 512 ranks do. The pause of an all-reduce leaves time for the fault.
SHARED = {"DDPDIAG_TEST_RELAYED": "1"}


def started(hosts: Callable, folder, ranks: int, **variables: str) -> Launched:
    """Two hosts with as many ranks each."""
    bed = Bed(
        ranks=(ranks, ranks),
        launcher=Launcher.ENV,
        on_rank={rank: {**SHARED, **variables} for rank in range(2 * ranks)},
    )
    return launch(hosts(2), bed, CHECK, folder / "run")


def relays(process: Process) -> int:
    """Relays of runs on the host of a process."""
    with open(f"/proc/{process.pid}/net/unix", encoding="ascii") as sockets:
        return sum("@ddpdiag-relay-" in line and line.split()[3] == "00010000" for line in sockets)


def stop(own: list[Process], supervisor: Process) -> None:
    supervisor.kill(signal.SIGSTOP)


def kill(own: list[Process], supervisor: Process) -> None:
    supervisor.kill(signal.SIGKILL)


def freeze(own: list[Process], supervisor: Process) -> None:
    for process in own:
        process.kill(signal.SIGSTOP)


def blamed(report: dict) -> set[int]:
    return {rank for finding in report["findings"] if finding["severity"] == "error" for rank in finding["ranks"]}


@pytest.mark.deep
def test_a_healthy_run_on_shared_connections_is_fit(hosts, tmp_path):
    report = report_of(started(hosts, tmp_path, 2), clean=True)
    assert (report["verdict"], blamed(report)) == ("fit", set()), report["findings"]


EIGHT = [pytest.param(8, fault, marks=[pytest.mark.deep, pytest.mark.alone]) for fault in (stop, kill, freeze)]


@pytest.mark.parametrize(("ranks", "fault"), [pytest.param(2, kill, marks=pytest.mark.deep), *EIGHT])
def test_the_rank_that_has_the_connection_is_blamed_alone(hosts, tmp_path, ranks, fault):
    run = started(hosts, tmp_path, ranks, DDPDIAG_TEST_FAULT=f"pause {ranks}")
    try:
        assert run.wait_until_reached(120), run.told()
        supervisor = run.launched(ranks)
        assert relays(supervisor) == 1
        fault(run.of_rank(ranks), supervisor)
        run.jobs["rank0"].wait(120)
        for process in run.of_rank(ranks):
            process.kill(signal.SIGKILL)
        report = report_of(run)
    finally:
        run.destroy()
    assert (report["verdict"], blamed(report)) == ("unfit", {ranks}), report["findings"]


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("killed", [True, False], ids=["after it was killed", "all"])
def test_who_is_told_to_leave_says_so_past_a_dead_connection(hosts, tmp_path, ranks, killed):
    """As torchrun ends the other ranks of a host; or a job is cancelled."""
    run = started(hosts, tmp_path, ranks, DDPDIAG_TEST_FAULT=f"pause {ranks}")
    try:
        assert run.wait_until_reached(120), run.told()
        supervisors = [run.launched(rank) for rank in range(2 * ranks)]
        for rank, supervisor in enumerate(supervisors):
            if killed and rank == ranks:
                supervisor.kill(signal.SIGKILL)
            elif not killed or rank > ranks:
                supervisor.kill(signal.SIGTERM)
        run.jobs["rank0"].wait(120)
        report = report_of(run)
    finally:
        run.destroy()
    assert report["exit_code"] == (1 if killed else 143)
    assert blamed(report) == ({ranks} if killed else set()), report["findings"]
    assert killed or accused(report) == set(), report["findings"]
