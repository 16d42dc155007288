"""The fork server forks only while no import has started CUDA (a context does not survive a fork)."""

import pytest
from jobs import CHECK, torchrun


@pytest.mark.deep
def test_workers_are_new_processes_where_an_import_starts_cuda(start):
    job = start(
        *torchrun(2), *CHECK, "--select", "LCH003,COL001", "--json", "{json}", "--record", "{json}l",
        DDPDIAG_TEST_FAULT="cuda-thread 1",
    )  # fmt: skip
    assert job.wait(120) == 0, job.told()
    records = (job.folder / "report.jsonl").read_text().splitlines()
    exec_records = [line for line in records if '"exec_reason":"' in line]
    assert exec_records
    assert all('"rank":1' in line for line in exec_records)
    job.check_left_nothing()
