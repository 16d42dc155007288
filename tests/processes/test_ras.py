"""A worker hangs beside a stand-in for NCCL's RAS service: what that says is kept, and its silence costs a second."""

import pytest
from jobs import CHECK, Job, Start, free_port

from ddpdiag.codec import read_recording
from ddpdiag.model import Outcome, Status

GUILTY = 1


def _started(start: Start, fault: str) -> Job:
    files = ("--json", "{json}", "--record", "{json}l", "--budget", "40", "--set", "COL001.deadline_seconds=4")
    job = start(
        *CHECK,
        *("--select", "LCH003,COL001", "--nproc-per-node", "2", *files),
        DDPDIAG_TEST_FAULT=f"{fault} {GUILTY}",
        NCCL_RAS_ADDR=f"localhost:{free_port()}",
    )
    job.wait_until(job.reached.exists)
    return job


def _outcomes(job: Job) -> dict[int, Outcome]:
    assert job.wait(90) == 1, job.told()
    job.check_left_nothing()
    recording = read_recording([job.json.with_name("report.jsonl")])
    return {outcome.rank: outcome for outcome in recording.outcomes if outcome.status is Status.HUNG}


@pytest.mark.deep
def test_what_nccl_says_of_the_hang_is_in_the_recording_and_in_the_evidence(start):
    job = _started(start, "ras")
    outcomes = _outcomes(job)
    assert "Rank 2 has launched up to operation 6" in outcomes[GUILTY].ras  # as in ras_server.REPORT
    assert outcomes[1 - GUILTY].ras == "", "no service runs in that process"
    (error,) = job.errors
    assert (error["code"], error["ranks"]) == ("RUN003.hung", [GUILTY])
    assert any("launched up to operation 7" in line for line in error["evidence"]["nccl_ras"])


@pytest.mark.deep
@pytest.mark.alone
def test_a_silent_service_spoils_no_evidence_and_delays_the_end_by_no_more_than_a_second(start):
    without, silent = _started(start, "sleep"), _started(start, "silent-ras")
    guilty = _outcomes(silent)[GUILTY]
    assert guilty.ras == ""
    assert guilty.collectives == ()
    assert guilty.process is not None
    assert any("_forever" in frame for frame in guilty.process.stack)
    _outcomes(without)
    # The other run waits up to half a second for the stacks, and beside others on two cores all takes longer.
    assert silent.report["seconds"] < without.report["seconds"] + 1.0 + 1.0
