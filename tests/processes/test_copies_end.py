"""P2P002 in a real run, on a host whose GPUs are a stand-in that only copies: what hangs is ended and named."""

import pytest
from fake_nvml import driver_of_eight
from jobs import CHECK, Job, Start

# LCH003 waits for torch, so that the deadline of the copies is their own.
COPIES = ("--nproc-per-node", "1", "--select", "LCH003,P2P002", "--json", "{json}")


@pytest.fixture
def checked(start: Start, tmp_path):
    """checked("4 hang 1 0"): the check on such GPUs, over."""

    def check(gpus: str, *options: str) -> Job:
        job = start(*CHECK, *COPIES, *options, DDPDIAG_TEST_GPUS=gpus, DDPDIAG_PROCFS=str(driver_of_eight(tmp_path)))
        job.wait()
        return job

    return check


def matrix(job):
    """Rates by pair, as the report has them."""
    (copy,) = [own for own in job.report["matrices"] if own["name"].startswith("p2p.copy.")]
    size = range(len(copy["rows"]))
    return {(row, column): copy["cells"][row][column] for row in size for column in size if row != column}


@pytest.mark.deep
def test_healthy_gpus_have_a_rate_for_every_pair(checked):
    job = checked("3")
    assert job.process.returncode == 0, job.told()
    assert job.report["findings"] == [], job.told()
    assert all(rate > 0 for rate in matrix(job).values())
    assert job.report["measurements"]["p2p.copy.min_bytes_per_s"] > 0
    job.check_left_nothing()


# The pairs of three GPUs from the one that fails on, in the order in which they are tried.
BEHIND = [(1, 0), (1, 2), (2, 0), (2, 1)]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("fault", "word", "unknown"),
    [
        ("die 1 0", "died", BEHIND),
        pytest.param("hang 1 0", "hung", BEHIND, marks=pytest.mark.deep),
        pytest.param("wrong 1 0", "wrong", [], marks=pytest.mark.deep),
    ],
)
def test_a_copy_that_fails_is_named_and_the_pairs_before_it_are_known(checked, fault, word, unknown):
    job = checked(f"3 {fault}", *(("--set", "P2P002.deadline_seconds=7") if word == "hung" else ()))
    assert job.process.returncode == 1, job.told()
    (finding,) = job.errors
    assert (finding["code"], finding["gpus"]) == (f"P2P002.{word}", ["GPU-0-1", "GPU-0-0"]), job.told()
    assert [way for way, rate in matrix(job).items() if rate is None] == unknown
    assert not unknown or "'copy GPU 1 -> GPU 0'" in finding["message"]
    assert not [own for own in job.report["findings"] if own["code"].startswith("RUN")], job.told()
    assert not job.has_traceback, job.told()
    job.check_left_nothing()
