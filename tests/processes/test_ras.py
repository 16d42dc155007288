"""A worker hangs beside a stand-in for NCCL's RAS service: what that says is kept, and its silence costs a second."""

import pytest
from jobs import CHECK, Job, Start, free_port

from ddpdiag.codec import read_recording
from ddpdiag.model import Outcome, Status

# One of them is held to a second.
pytestmark = pytest.mark.alone

GUILTY = 1
BUDGET = 40


@pytest.fixture(scope="module")
def runs(start_shared: Start) -> dict[str, Job]:
    """Three runs in which rank 1 hangs: without a service, with one that answers, and with one that never does."""
    return {fault: _started(start_shared, fault) for fault in ("sleep", "ras", "silent-ras")}


def _started(start: Start, fault: str) -> Job:
    files = ("--json", "{json}", "--record", "{json}l", "--budget", str(BUDGET), "--set", "COL001.deadline_seconds=4")
    address = f"localhost:{free_port()}"
    job = start(
        *CHECK,
        *("--select", "LCH003,COL001", "--nproc-per-node", "2", *files),
        DDPDIAG_TEST_FAULT=f"{fault} {GUILTY}",
        NCCL_RAS_ADDR=address,
    )
    job.wait_until(job.reached.exists)
    return job


def _outcomes(job: Job) -> dict[int, Outcome]:
    assert job.wait(BUDGET) == 1, job.told()
    recording = read_recording([job.json.with_name("report.jsonl")])
    return {outcome.rank: outcome for outcome in recording.outcomes if outcome.status is Status.HUNG}


def test_what_nccl_says_of_the_hang_is_in_the_recording_and_in_the_evidence(runs):
    outcomes = _outcomes(runs["ras"])
    assert "Rank 2 has launched up to operation 6" in outcomes[GUILTY].ras
    assert outcomes[1 - GUILTY].ras == "", "no service runs in that process"
    (error,) = runs["ras"].errors
    assert (error["code"], error["ranks"]) == ("RUN003.hung", [GUILTY])
    assert any("launched up to operation 7" in line for line in error["evidence"]["nccl_ras"])


def test_a_silent_service_spoils_no_evidence(runs):
    guilty = _outcomes(runs["silent-ras"])[GUILTY]
    assert guilty.ras == ""
    assert guilty.flight == ()
    assert guilty.process is not None
    assert any("_forever" in frame for frame in guilty.process.stack)


def test_a_silent_service_delays_the_end_by_no_more_than_a_second(runs):
    without, silent = (_seconds(runs[fault]) for fault in ("sleep", "silent-ras"))
    # The other run waits up to half a second for the stacks, and beside others on two cores all takes longer.
    assert silent < without + 1.0 + 1.0


def _seconds(job: Job) -> float:
    _outcomes(job)
    return float(job.report["seconds"])


def test_nothing_stays_behind(runs):
    for job in runs.values():
        job.wait(BUDGET)
        job.check_left_nothing()
