"""Two runs with one MASTER_PORT: each goes on with its own ranks, and the port is blamed."""

import pytest
from jobs import by_hand, free_port

SELECT = ("--select", "LCH001,HST001,COL001")


@pytest.mark.deep
def test_jobs_of_slurm_are_told_apart(start):
    port = free_port()
    jobs = [[start(*by_hand(rank, 2, port, *SELECT), SLURM_JOB_ID=job) for rank in (0, 1)] for job in ("71", "72")]
    for job in jobs:
        for rank in job:
            assert rank.wait(90) == 0, rank.told()
        report = next(rank.report for rank in job if rank.reports)
        assert report["verdict"] == "fit"
        assert len(report["ranks"]) == 2
    codes = {finding["code"] for job in jobs for rank in job if rank.reports for finding in rank.report["findings"]}
    assert "LCH001.other-run" in codes
