"""Runs on three hosts that are cancelled, in the search for failing hosts as well: no rank is blamed."""

import json
import signal
from contextlib import suppress

import pytest
from jobs import accused
from launch import Bed, Launched, Launcher, launch

pytestmark = pytest.mark.hosts

CHECK = ("-m", "ddpdiag", "check", "--stage", "rendezvous,fabric", "--budget", "90", "--json", "{json}")
THREE = Bed(ranks=(1, 1, 1), launcher=Launcher.ENV)


def cancelled(running: Launched, told: tuple[int, ...], moment: int) -> dict:
    """The report of a run in which these ranks get SIGTERM as soon as rank 0's record has so many lines."""
    try:
        first = running.jobs["rank0"]
        first.wait_until(lambda: first.recorded() >= moment)
        for rank in told:
            own = running.jobs[f"rank{rank}"]
            own.wait_until(lambda own=own, rank=rank: own.recorded(rank))  # it has handlers for signals
        # All are looked up first: the others may end as soon as one was told to.
        for process in [running.launched(rank) for rank in told]:
            with suppress(ProcessLookupError):
                process.kill(signal.SIGTERM)
        assert running.is_over(60), running.told()
        report = json.loads(running.json.read_text())
        came = {0, *told, *(row["rank"] for row in report["ranks"])}
        for rank in range(THREE.size):
            job = running.jobs[f"rank{rank}"]
            # Who comes when the run is over already cannot know that it was cancelled.
            late = rank not in came and "did not reach rank 0" in job.stderr
            assert job.process.returncode == (3 if late else 143), running.told()
        return report
    finally:
        running.destroy()


def wrongly_accused(report: dict) -> set[str]:
    """The findings that blame somebody. A link may really be slow on busy cores: RDZ004 measures it twice, then."""
    (mesh,) = [check["statuses"] for check in report["checks"] if check["code"] == "RDZ004"]
    return accused(report) - ({"RDZ004.slow"} if mesh == {"done": 2 * THREE.size} else set())


@pytest.mark.parametrize("told", [(0, 1, 2), (2,), (0,)], ids=["all", "rank-2", "rank-0"])
@pytest.mark.parametrize("moment", [pytest.param(m, marks=pytest.mark.long) for m in range(1, 20)])
def test_a_cancelled_run_on_three_hosts_blames_no_rank_at_any_moment(hosts, tmp_path, moment, told):
    report = cancelled(launch(hosts(3), THREE, CHECK, tmp_path / "run"), told, moment)
    assert (report["exit_code"], wrongly_accused(report)) == (143, set()), report["findings"]


@pytest.mark.deep
def test_a_run_on_three_hosts_that_is_cancelled_in_the_search_for_failing_hosts_blames_no_rank(hosts, tmp_path):
    # Without the rates of RDZ004: on a busy machine a link may really be slow for a moment.
    # Many rounds: the search must still go on when the signal arrives.
    options = ("--ignore", "RDZ004", "--set", "FAB001.rounds=60")
    running = launch(hosts(3), THREE, (*CHECK, *options), tmp_path / "run")
    running.jobs["rank0"].wait_until(lambda: running.jobs["rank0"].recorded(word='"code":"FAB001"'), 60)
    report = cancelled(running, (0, 1, 2), 1)
    assert (report["exit_code"], accused(report)) == (143, set()), report["findings"]
    assert report["hosts"]["healthy"] == []
