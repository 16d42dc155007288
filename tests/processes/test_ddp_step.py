"""One step of DistributedDataParallel with a fault in one rank, and training beside busy processes: named, with why."""

import subprocess
import sys

import pytest
from jobs import CHECK, Start

# What is injected, the finding, the ranks that it names, the exit code, and what all wait for.
FAULTS = {
    "gradient 2": ("TRN003.gradient", [2], 1, None),
    "weights 1": ("TRN003.weights", [1], 0, None),
    "skip 1": ("RUN003.mismatch", [1], 1, None),
    "slow-data 2": ("TRN003.straggler", [2], 0, "data"),
    "slow-compute 1": ("TRN003.straggler", [1], 0, "compute"),
}
ALONE = (pytest.mark.alone, pytest.mark.deep)


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=ALONE) for fault in FAULTS])
def test_the_rank_is_named(start: Start, fault: str) -> None:
    check_named(start, fault, "TRN003.deadline_seconds=15")


def test_a_slow_rank_is_named(start: Start) -> None:
    """So slow in each step that no other process of this machine makes a healthy rank as late."""
    check_named(start, "slow-data 2", "TRN003.deadline_seconds=90", DDPDIAG_TEST_SLOW_SECONDS="0.06")


def check_named(start: Start, fault: str, deadline: str, **variables: str) -> None:
    code, ranks, exit_code, why = FAULTS[fault]
    options = ("--select", "LCH003,TRN003", "--set", deadline, "--budget", "150", "--json", "{json}")
    job = start(*CHECK, "--nproc-per-node", "3", *options, DDPDIAG_TEST_FAULT=fault, **variables)
    assert job.wait(150) == exit_code, job.told()
    findings = {finding["code"]: finding for finding in job.report["findings"]}
    assert code in findings, job.told()
    assert findings[code]["ranks"] == ranks
    assert findings[code]["evidence"].get("class") == why
    if code == "TRN003.straggler":
        assert (job.report["verdict"], job.report["degraded"]) == ("fit", True)
    # A busy machine may make a healthy rank late as well; nobody else is said to be wrong.
    assert {*findings} <= {code, "TRN003.straggler"}
    job.check_left_nothing()


@pytest.mark.deep
@pytest.mark.alone
def test_processes_that_take_the_cores_are_named(start: Start) -> None:
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        options = ("--nproc-per-node", "2", "--select", "LCH003,TRN001", "--json", "{json}")
        job = start(*CHECK, *options, DDPDIAG_SET="TRN001.others_share=0.2")
        assert job.wait(100) == 0, job.told()
    finally:
        for process in burning:
            process.kill()
            process.wait()
    (found,) = job.report["findings"]
    assert (found["code"], job.report["degraded"]) == ("TRN001.stolen-cores", True)
    assert {process.pid for process in burning} <= {*found["evidence"]["pids"]}
