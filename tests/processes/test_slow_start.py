"""A backend that is slow to start: reported as slow with its seconds, and as a hang only where it never ends.

The stand-in for NCCL (tests/inject/standin.py) sleeps while its group is created.
"""

import json

import pytest
from jobs import CHECK, Job, Start

OPTIONS = ("--nproc-per-node", "2", "--backend", "standin", "--select", "COL001", "--json", "{json}")


def checked(start: Start, fault: dict[str, object], *options: str) -> tuple[Job, dict]:
    job = start(*CHECK, *OPTIONS, *options, DDPDIAG_TEST_STANDIN=json.dumps([fault]))
    job.wait(110)
    return job, json.loads(job.json.read_text())


@pytest.mark.deep
def test_a_communicator_that_takes_twice_the_deadline_is_slow_and_no_hang(start: Start) -> None:
    fault = {"kind": "slow-init", "seconds": 11}
    job, report = checked(start, fault, "--set", "COL001.deadline_seconds=5", "--budget", "100")
    (finding,) = report["findings"]
    assert (finding["code"], finding["severity"], finding["ranks"]) == ("RUN003.slow-start", "warning", [])
    assert finding["evidence"]["step"] == "communicator"
    assert finding["evidence"]["seconds"] >= 11
    assert (report["verdict"], job.process.returncode) == ("fit", 0)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("deadline", "budget", "code", "verdict", "exit_code"),
    [(20, "60", "RUN003.hung", "unfit", 1), (5, "26", "RUN004.unfinished", "unknown", 3)],
    ids=["the deadline ends it", "the budget ends it"],
)
def test_a_communicator_that_never_ends_is_a_hang_unless_the_budget_ends_it(
    start: Start, deadline: int, budget: str, code: str, verdict: str, exit_code: int
) -> None:
    options = ("--set", f"COL001.deadline_seconds={deadline}", "--budget", budget)
    job, report = checked(start, {"kind": "hang-init"}, *options)
    (found,) = [finding for finding in report["findings"] if finding["code"].startswith("RUN00")]
    assert (found["code"], found["evidence"]["last_step"]) == (code, "communicator")
    assert (report["verdict"], job.process.returncode) == (verdict, exit_code)
