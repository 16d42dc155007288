"""One step of DistributedDataParallel with a fault in one rank: named, with what it is."""

import pytest
from jobs import CHECK, Start

# What is injected, the finding, the ranks that it names, the exit code, and what it says.
FAULTS = {
    "gradient 2": ("TRN003.gradient", [2], 1, "two others computed another gradient"),
    "weights 1": ("TRN003.weights", [1], 0, "rank 1 on"),
    "skip 1": ("RUN003.mismatch", [1], 1, "posted another collective"),
    "slow-data 2": ("TRN003.straggler", [2], 0, "all wait for rank 2: it waits for its images"),
    "slow-compute 1": ("TRN003.straggler", [1], 0, "all wait for rank 1: it computes longer"),
}


@pytest.mark.alone
@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_is_named(start: Start, fault: str) -> None:
    code, ranks, exit_code, words = FAULTS[fault]
    job = start(
        *CHECK, "--nproc-per-node", "3", "--select", "LCH003,TRN003", "--set", "TRN003.deadline_seconds=15",
        "--json", "{json}", DDPDIAG_TEST_FAULT=fault,
    )  # fmt: skip
    assert job.wait(60) == exit_code, job.told()
    findings = {finding["code"]: finding for finding in job.report["findings"]}
    assert code in findings, job.told()
    assert findings[code]["ranks"] == ranks
    assert words in findings[code]["title"] + findings[code]["message"]
    # A busy machine may make a healthy rank late as well; nobody else is said to be wrong.
    assert {*findings} <= {code, "TRN003.straggler"}
    job.check_left_nothing()
