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
def test_a_communicator_that_never_ends_is_a_hang_at_that_step(start: Start) -> None:
    options = ("--set", "COL001.deadline_seconds=20", "--budget", "60")
    job, report = checked(start, {"kind": "hang-init"}, *options)
    hung = next(finding for finding in report["findings"] if finding["code"] == "RUN003.hung")
    assert hung["evidence"]["last_step"] == "communicator"
    assert (report["verdict"], job.process.returncode) == ("unfit", 1)


@pytest.mark.deep
def test_a_communicator_that_the_budget_ends_is_no_hang(start: Start) -> None:
    options = ("--set", "COL001.deadline_seconds=5", "--budget", "26")
    job, report = checked(start, {"kind": "hang-init"}, *options)
    (found,) = [finding for finding in report["findings"] if finding["code"].startswith("RUN00")]
    assert (found["code"], found["evidence"]["last_step"]) == ("RUN004.unfinished", "communicator")
    assert (report["verdict"], job.process.returncode) == ("unknown", 3)
