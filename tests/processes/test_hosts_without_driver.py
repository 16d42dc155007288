"""A host whose GPU is on the PCI bus, with nobody to drive it."""

from pathlib import Path

from jobs import CHECK, Start


def test_a_gpu_without_a_driver_is_not_fit(start: Start, tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    job = start(*CHECK, "--stage", "gpu", "--json", "{json}", DDPDIAG_SYSFS=str(tmp_path / "sys"))
    assert job.wait() == 1
    assert job.report["verdict"] == "unfit"
    assert [finding["code"] for finding in job.errors] == ["GPU001.fewer"]
    assert "0000:1b:00.0" in job.stdout
    job.check_left_nothing()


def test_a_pci_bus_that_cannot_be_read_is_unknown(start: Start, tmp_path: Path) -> None:
    job = start(*CHECK, "--select", "GPU001", "--json", "{json}", DDPDIAG_SYSFS=str(tmp_path / "nowhere"))
    assert job.wait() == 3
    assert job.report["verdict"] == "unknown"
