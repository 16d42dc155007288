"""The PCI bus in a fake sysfs."""

import os
from pathlib import Path

from ddpdiag.probes.gpu.visibility import PciFunction, nvidia_functions, pci_gpu_count
from ddpdiag.probes.host.kernel import rdma_devices, sys_root


def add_function(root: Path, address: str, *, vendor="0x10de", kind="0x030200", driver: str | None = "nvidia") -> None:
    device = root / "bus" / "pci" / "devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver:
        (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")


def test_a_gpu_is_a_display_or_3d_function_of_nvidia(tmp_path):
    add_function(tmp_path, "0000:1b:00.0")
    add_function(tmp_path, "0000:01:00.0", kind="0x030000", driver="nouveau")
    add_function(tmp_path, "0000:01:00.1", kind="0x040300")  # its sound
    add_function(tmp_path, "0000:05:00.0", kind="0x068000")  # an NVSwitch
    add_function(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000")
    add_function(tmp_path, "0000:3b:00.0", driver=None)
    assert nvidia_functions(tmp_path) == (
        PciFunction("0000:01:00.0", "nouveau"),
        PciFunction("0000:1b:00.0", "nvidia"),
        PciFunction("0000:3b:00.0", None),
    )
    assert pci_gpu_count(tmp_path) == 3


def test_a_kernel_without_pci_has_an_empty_bus(tmp_path):
    (tmp_path / "bus" / "virtio").mkdir(parents=True)
    assert pci_gpu_count(tmp_path) == 0


def test_a_sysfs_that_is_not_there_is_unknown_and_not_empty(tmp_path):
    assert nvidia_functions(tmp_path) is pci_gpu_count(tmp_path) is rdma_devices(tmp_path) is None


def test_rdma_devices_are_named(tmp_path):
    (tmp_path / "class").mkdir()
    assert rdma_devices(tmp_path) == ()
    os.makedirs(tmp_path / "class" / "infiniband" / "mlx5_0")
    assert rdma_devices(tmp_path) == ("mlx5_0",)


def test_a_device_that_hides_its_identity_is_unknown(tmp_path):
    (tmp_path / "bus" / "pci" / "devices" / "0000:1b:00.0").mkdir(parents=True)
    assert pci_gpu_count(tmp_path) is None


def test_the_root_can_be_replaced():
    assert sys_root({}) == Path("/sys")
    assert sys_root({"DDPDIAG_SYSFS": "/host/sys"}) == Path("/host/sys")
