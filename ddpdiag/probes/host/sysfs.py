"""What /sys shows: NVIDIA functions on the PCI bus, with or without a driver, and RDMA devices."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.files import read_text

NVIDIA = "0x10de"
# VGA and 3D controllers; an NVSwitch is a bridge (0x0680), a GPU's sound function 0x0403.
GPU_CLASSES = ("0x0300", "0x0302")


class PciFunction(Struct, frozen=True):
    """A PCI function, such as 0000:1b:00.0; `driver` is the kernel driver bound to it, None when there is none."""

    address: str
    driver: str | None


def sys_root(env: Mapping[str, str]) -> Path:
    """Where sysfs lies: $DDPDIAG_SYSFS (a host's tree mounted into a container, or a test's fake), else /sys."""
    return Path(env.get("DDPDIAG_SYSFS") or "/sys")


def nvidia_functions(root: Path) -> tuple[PciFunction, ...] | None:
    """Display and 3D functions of NVIDIA, in bus order, or None if the bus cannot be looked at.

    A kernel without PCI has /sys/bus but no /sys/bus/pci: that is an empty bus, not an unknown one.
    """
    bus = root / "bus"
    try:
        if not any(entry.name == "pci" for entry in bus.iterdir()):
            return ()
        devices = sorted((bus / "pci" / "devices").iterdir())
    except OSError:
        return None
    identities = [(device, read_text(device / "vendor"), read_text(device / "class")) for device in devices]
    # Present, but neither file readable: it could be a GPU.
    if any(None in identity and identity[0].exists() for identity in identities):
        return None
    return tuple(
        PciFunction(device.name, _driver_of(device))
        for device, vendor, kind in identities
        if vendor == NVIDIA and kind is not None and kind.startswith(GPU_CLASSES)
    )


def _driver_of(device: Path) -> str | None:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return None


def rdma_devices(root: Path) -> tuple[str, ...] | None:
    """Names of InfiniBand and RoCE devices, or None if /sys/class cannot be looked at.

    Without an RDMA driver there is no /sys/class/infiniband: that is no device, not an unknown number.
    """
    classes = root / "class"
    try:
        if not any(entry.name == "infiniband" for entry in classes.iterdir()):
            return ()
        return tuple(sorted(entry.name for entry in (classes / "infiniband").iterdir()))
    except OSError:
        return None
