"""Obstacles to direct transfers between GPUs over PCIe, read from /proc and /sys: ACS, IOMMU, virtual machine.

A bridge with ACS (Access Control Services) redirects one GPU's writes to another GPU up to the root complex, instead of
across the switch. An IOMMU then translates them. NVML does not report this: its P2P status stays OK. Without root, the
kernel shows only the first 64 bytes of a config space, so ACS is often not known.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import names_in, read_int, read_pairs, read_text

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

# linux/pci_regs.h: start and end of the extended capabilities; the id of ACS, and the offset of its control register.
_CONVENTIONAL_BYTES, _EXTENDED_BYTES = 0x100, 0x1000
_ACS_ID, _ACS_CONTROL = 0x000D, 0x06
# Request Redirect, Completion Redirect, Egress Control: the kernel tests the same bits (p2pdma.c,
# pci_bridge_has_acs_redir). Upstream Forwarding alone only forwards what a bridge below has redirected.
_REDIRECTS = 0x0004 | 0x0008 | 0x0020


class Bridge(Struct, frozen=True, array_like=True):
    """A PCI bridge and its ACS control register: 0 if it has no ACS, None if the register cannot be read."""

    address: str
    acs: int | None

    @property
    def redirects(self) -> bool:
        """Whether the bridge sends traffic between peers upstream."""
        return bool((self.acs or 0) & _REDIRECTS)


class Slot(Struct, frozen=True, kw_only=True):
    """The slot of a GPU or a network adapter: the bridges above the device, from the root port down, and its NUMA node.

    `grouped` says whether the device is in an IOMMU group (None: the device is not in sysfs). `domain` is the type of
    that group as the kernel writes it: "DMA" or "DMA-FQ" if the IOMMU translates, "identity" if it does not, None
    without a group or if the kernel does not say. `numa_node` is None if the firmware does not name a node.
    """

    pci: str
    bridges: tuple[str, ...] = ()
    grouped: bool | None = None
    domain: str | None = None
    numa_node: int | None = None


class PcieTopology(Struct, frozen=True, kw_only=True):
    """The properties of a host that decide how its GPUs reach each other over PCIe.

    `virtual` says that the host is a virtual machine (None: ARM processors do not say). `processor` is the processors'
    maker as the kernel writes it ("GenuineIntel"), or "ARM"; None if the maker is not known.
    """

    virtual: bool | None = None
    slots: tuple[Slot, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    processor: str | None = None

    def slot(self, pci: str | None) -> Slot:
        """The slot with this PCI address; a slot with default values if the address is not known."""
        return next((slot for slot in self.slots if slot.pci == pci), Slot(pci=pci or "?"))

    def bridges_between(self, one: str | None, other: str | None) -> tuple[Bridge, ...]:
        """The bridges on the path between two GPUs: those that are above exactly one of the two."""
        first, second = self.slot(one).bridges, self.slot(other).bridges
        above_only_one = {*first} ^ {*second}
        return tuple(bridge for bridge in self.bridges if bridge.address in above_only_one)

    def share_a_bridge(self, one: str | None, other: str | None) -> bool:
        """Whether some bridge is above both GPUs, so that traffic between them need not pass the processor."""
        return bool({*self.slot(one).bridges} & {*self.slot(other).bridges})

    def translates(self, pci: str | None) -> bool | None:
        """Whether the IOMMU translates the writes of this GPU; None if the kernel does not say."""
        slot = self.slot(pci)
        if slot.domain is not None:
            return slot.domain.upper().startswith("DMA")
        return False if slot.grouped is False else None


def read_pcie_topology(gpus: Sequence[str], proc_root: Path, sys_root: Path) -> PcieTopology:
    """Read from procfs and sysfs the host's properties and the slots of the GPUs with these PCI addresses."""
    slots = tuple(slot_of(address, sys_root) for address in gpus)
    above = dict.fromkeys(address for slot in slots for address in slot.bridges)
    cpu = read_pairs(proc_root / "cpuinfo", ":")
    bridges = []
    for address in above:
        config = b""
        with suppress(OSError), (sys_root / "bus" / "pci" / "devices" / address / "config").open("rb") as file:
            config = file.read(_EXTENDED_BYTES)
        bridges.append(Bridge(address, acs_control(config)))
    # x86 processors have a flag that hypervisors set. Xen is also visible in sysfs.
    flags, is_xen = cpu.get("flags"), bool(names_in(sys_root / "hypervisor"))
    return PcieTopology(
        virtual=is_xen or (None if flags is None else "hypervisor" in flags.split()),
        slots=slots,
        bridges=tuple(bridges),
        processor=_maker(cpu),
    )


@contextmanager
def on_local_cores(pci: str | None, sys_root: Path) -> Iterator[None]:
    """Run this thread on the cores next to a PCI device, so that memory it allocates is on the device's NUMA node.

    nvbandwidth does the same (memcpy.cpp, HostBuffer: setOptimalCpuAffinity). The affinity is restored afterwards. It
    is not changed if the firmware does not name the node, or if this process may not use the node's cores.
    """
    before = os.sched_getaffinity(0)
    if pci is not None and slot_of(pci, sys_root).numa_node is not None:
        cores = _parse_cpu_list(read_text(sys_root / "bus" / "pci" / "devices" / pci / "local_cpulist") or "")
        with suppress(OSError, OverflowError):
            os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _parse_cpu_list(text: str) -> set[int]:
    """Expand a list in the kernel's format (bitmap_parselist), such as "0-3,8"; empty if `text` has another format."""
    parts = [part.split("-") for part in text.split(",")]
    if not all(end.isdigit() for part in parts for end in part):
        return set()
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


def processor_maker(proc_root: Path) -> str | None:
    """Read the maker of the processors, as in `PcieTopology.processor`."""
    return _maker(read_pairs(proc_root / "cpuinfo", ":"))


def _maker(cpu: Mapping[str, str]) -> str | None:
    return cpu.get("vendor_id") or ("ARM" if "CPU implementer" in cpu else None)


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a PCI config space; 0 if there is no ACS, None if the register cannot be read.

    Extended capabilities are a linked list from 0x100 on. Each starts with an id of 16 bits, a version of 4 bits, and
    the offset of the next capability in 12 bits (PCI Express Base Specification, 7.6.3; ACS is 7.7.11).
    """
    if len(config) < _CONVENTIONAL_BYTES:
        return None
    offset = _CONVENTIONAL_BYTES
    if len(config) == offset:
        return 0  # conventional PCI, which has no extended space
    for _ in range((_EXTENDED_BYTES - _CONVENTIONAL_BYTES) // 4):
        if not _CONVENTIONAL_BYTES <= offset <= len(config) - 8:
            return None
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_ID:
            return int(struct.unpack_from("<H", config, offset + _ACS_CONTROL)[0])
        offset = header >> 20 & 0xFFC
        if offset == 0 or header in (0, 0xFFFFFFFF):
            return 0
    return None  # the list is a ring


def slot_of(address: str, sys_root: Path) -> Slot:
    """Read the slot of the device with this PCI address from sysfs."""
    device = sys_root / "bus" / "pci" / "devices" / address
    try:
        # sysfs nests devices as the bus does: .../pci0000:17/0000:17:01.0/0000:18:00.0/0000:1b:00.0
        parts = device.resolve().parts
    except (OSError, RuntimeError):
        parts = ()
    group, node = device / "iommu_group", read_int(device / "numa_node")
    return Slot(
        pci=address,
        bridges=tuple(part for part in parts[:-1] if _ADDRESS.fullmatch(part)),
        grouped=group.exists() if device.exists() else None,
        domain=read_text(group / "type") or None,
        # The kernel writes -1 if the firmware does not name a node (Documentation/ABI/testing/sysfs-bus-pci).
        numa_node=node if node is not None and node >= 0 else None,
    )
