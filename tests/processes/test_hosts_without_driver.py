"""A host whose GPU is on the PCI bus, with nobody to drive it."""

from pathlib import Path

import pytest
from jobs import CHECK, Start


@pytest.mark.parametrize(
    ("sysfs", "code", "verdict", "errors"), [("sys", 1, "unfit", ["GPU001.fewer"]), ("nowhere", 3, "unknown", [])]
)
def test_a_gpu_without_a_driver_is_not_fit_and_a_bus_that_cannot_be_read_is_unknown(
    start: Start, tmp_path: Path, sysfs: str, code: int, verdict: str, errors: list[str]
) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    job = start(*CHECK, "--select", "GPU001", "--json", "{json}", DDPDIAG_SYSFS=str(tmp_path / sysfs))
    assert job.wait() == code, job.told()
    assert job.report["verdict"] == verdict
    assert [finding["code"] for finding in job.errors] == errors
    assert ("0000:1b:00.0" in job.stdout) is (sysfs == "sys")
    job.check_left_nothing()
