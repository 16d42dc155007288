"""The fork server forks only while no import has started CUDA (a context does not survive a fork)."""

from jobs import CHECK, torchrun


def test_workers_are_new_processes_where_an_import_starts_cuda(start):
    job = start(
        *torchrun(2), *CHECK, "--select", "LCH003,COL001", "--json", "{json}",
        DDPDIAG_TEST_FAULT="cuda-thread 1",
    )  # fmt: skip
    assert job.wait(120) == 0, job.told()
    (finding,) = [finding for finding in job.report["findings"] if finding["code"].startswith("LCH003")]
    assert finding["code"] == "LCH003.not-forked"
    assert "rank 1" in finding["message"]
    job.check_left_nothing()
