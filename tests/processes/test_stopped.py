"""A worker that is stopped, or stuck in the kernel, is decided some 10 s later."""

import signal

import pytest
from jobs import CHECK, Start

from ddpdiag.codec import read_recording
from ddpdiag.model import Status

GUILTY = 1
# 10 s without a step, looks every half second, and a busy machine.
AT_MOST = 30


@pytest.mark.deep
@pytest.mark.parametrize(
    ("code", "fault", "state", "word"),
    [
        ("TRN001", "slower", "T", "is stopped"),
        pytest.param("COL001", "pause", "T", "is stopped", marks=pytest.mark.deep),
        pytest.param("TRN001", "stuck", "D", "stuck in", marks=pytest.mark.deep),
    ],
)
def test_a_rank_that_is_stopped_or_stuck_is_named_long_before_its_deadline(
    start: Start, code: str, fault: str, state: str, word: str
) -> None:
    options = ("--select", f"LCH003,{code}", "--set", f"{code}.deadline_seconds=60", "--budget", "100")
    files = ("--json", "{json}", "--record", "{json}l")
    job = start(*CHECK, "--nproc-per-node", "2", *options, *files, DDPDIAG_TEST_FAULT=f"{fault} {GUILTY}")
    job.wait_until(job.reached.exists)
    if state == "T":
        job.worker(GUILTY).kill(signal.SIGSTOP)
    assert job.wait(100) == 1, job.told()
    (finding,) = job.errors
    assert (finding["code"], finding["ranks"], finding["evidence"]["state"]) == ("RUN003.hung", [GUILTY], state)
    assert word in finding["message"]
    recording = read_recording([job.json.with_suffix(".jsonl")])
    outcomes = {outcome.rank: outcome for outcome in recording.outcomes if outcome.code == code}
    process = outcomes[GUILTY].process
    assert process is not None
    assert process.step_seconds is not None
    assert process.step_seconds <= AT_MOST
    assert outcomes[GUILTY].status is Status.HUNG
    assert not outcomes[GUILTY].interrupted
    if state == "T":  # else the process that held it
        job.check_left_nothing()
