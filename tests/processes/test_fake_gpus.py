"""The whole tool on a host whose NVML is a stand-in: eight GPUs, of which one is sick, or does not answer."""

from pathlib import Path

import fake_nvml
import pytest
from jobs import CHECK, Job, Start

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="there is no C compiler for the stand-in")
HEALTH = ("--nproc-per-node", "1", "--select", "GPU003,GPU004,GPU005,GPU006,GPU007,GPU008,GPU009", "--json", "{json}")


@pytest.fixture
def checked(start: Start, tmp_path: Path):
    """checked("healthy", ...): the check with that stand-in, over."""

    def check(name: str, *options: str) -> Job:
        variables = {
            "LD_LIBRARY_PATH": str(fake_nvml.build(name, tmp_path)),
            "DDPDIAG_PROCFS": str(fake_nvml.driver_of_eight(tmp_path)),
        }
        job = start(*CHECK, *HEALTH, *options, **variables)
        job.wait()
        return job

    return check


def test_healthy_gpus_are_silent(checked):
    job = checked("healthy")
    assert job.process.returncode == 0, job.told()
    assert [f for f in job.report["findings"] if f["code"].startswith("GPU")] == [], job.told()
    job.check_left_nothing()


@pytest.mark.parametrize(
    ("name", "code"),
    [("ecc-uncorrected", "GPU003.uncorrected"), ("pcie-x8", "GPU004.narrow"), ("throttle-thermal", "GPU005.slowdown")],
)
def test_the_sick_gpu_is_named_and_no_other_one(checked, name, code):
    job = checked(name)
    (finding,) = [f for f in job.report["findings"] if f["code"].startswith("GPU")]
    assert (finding["code"], finding["gpus"]) == (code, [fake_nvml.uuid_of(5)]), job.told()
    assert fake_nvml.pci_of(5) in finding["message"]
    assert not job.has_traceback, job.told()


def test_a_call_that_hangs_ends_in_a_hung_trial_and_not_in_a_hung_tool(checked):
    job = checked("hanging", "--set", "GPU003.deadline_seconds=3")
    assert job.process.returncode == 1, job.told()
    (hung,) = job.errors
    assert hung["code"] == "RUN003.hung"
    assert f"GPU 5 (PCI {fake_nvml.pci_of(5)})" in hung["message"]
    job.check_left_nothing()
