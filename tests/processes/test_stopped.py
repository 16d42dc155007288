"""A worker that is stopped is decided some 10 s later, whatever its check had left of its time."""

import signal

import pytest
from jobs import CHECK, Start

from ddpdiag.codec import read_recording
from ddpdiag.model import Status

GUILTY = 1
# 10 s without a step, looks every half second, and a busy machine.
AT_MOST = 18


@pytest.mark.parametrize(("code", "fault"), [("TRN001", "slower"), ("COL001", "pause")])
def test_a_rank_that_is_stopped_is_named_long_before_its_deadline(start: Start, code: str, fault: str) -> None:
    options = ("--select", f"LCH003,{code}", "--set", f"{code}.deadline_seconds=60", "--budget", "100")
    files = ("--json", "{json}", "--record", "{json}l")
    job = start(*CHECK, "--nproc-per-node", "2", *options, *files, DDPDIAG_TEST_FAULT=f"{fault} {GUILTY}")
    job.wait_until(job.reached.exists)
    job.worker(GUILTY).kill(signal.SIGSTOP)
    assert job.wait(100) == 1, job.told()
    (finding,) = job.errors
    assert (finding["code"], finding["ranks"], finding["evidence"]["state"]) == ("RUN003.hung", [GUILTY], "T")
    assert "stopped" in finding["message"]
    recording = read_recording([job.json.with_suffix(".jsonl")])
    outcomes = {outcome.rank: outcome for outcome in recording.outcomes if outcome.code == code}
    process = outcomes[GUILTY].process
    assert process is not None
    assert process.step_seconds is not None
    assert process.step_seconds <= AT_MOST
    assert outcomes[GUILTY].status is Status.HUNG
    assert not outcomes[GUILTY].told
    job.check_left_nothing()
