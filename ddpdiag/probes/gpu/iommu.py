"""Obstacles between PCIe peers, as far as it can be read without asking a GPU: IOMMU, ACS, virtual machine.

ACS (Access Control Services) on a bridge sends what one GPU writes to another up to the root complex instead of across
the switch, and an IOMMU then translates it. NVML knows nothing of either: its P2P status says OK all the same.
Without root the kernel shows the first 64 bytes of a config space only, so ACS is often not known.
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

# linux/pci_regs.h: where the extended capabilities start, and the one that is looked for.
_CONVENTIONAL_BYTES, _EXTENDED_BYTES = 0x100, 0x1000
_ACS_ID, _ACS_CONTROL = 0x000D, 0x06
# Request Redirect, Completion Redirect, Egress Control: what the kernel itself takes for a redirection (p2pdma.c,
# pci_bridge_has_acs_redir). Upstream Forwarding alone only passes on what a bridge below has redirected.
_REDIRECTS = 0x0004 | 0x0008 | 0x0020


class Bridge(Struct, frozen=True, array_like=True):
    """A PCI bridge and its ACS control register: 0 where it has no ACS, None where that cannot be read."""

    address: str
    acs: int | None

    @property
    def redirects(self) -> bool:
        """Whether it sends traffic between peers upstream."""
        return bool((self.acs or 0) & _REDIRECTS)


class Slot(Struct, frozen=True, kw_only=True):
    """The slot of a GPU or a network adapter: the bridges above it, from the root port down, and its NUMA node.

    `domain` is the kernel's word for how the IOMMU treats it: "DMA" or "DMA-FQ" where it translates, "identity" where
    it does not, None where the device is in no group or the kernel does not say. `grouped` is None where sysfs does not
    show the device at all, `numa_node` where the firmware does not name one.
    """

    pci: str
    bridges: tuple[str, ...] = ()
    grouped: bool | None = None
    domain: str | None = None
    numa_node: int | None = None


class Surroundings(Struct, frozen=True, kw_only=True):
    """A host around its GPUs.

    `virtual` is None where the processor has no flag that says whether this is a virtual machine (ARM). `processor` is
    its maker as the kernel writes it ("GenuineIntel"), "ARM", or None where that is not known.
    """

    virtual: bool | None = None
    slots: tuple[Slot, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    processor: str | None = None

    def slot(self, pci: str | None) -> Slot:
        """The slot of that GPU; an empty one if it is not known."""
        return next((slot for slot in self.slots if slot.pci == pci), Slot(pci=pci or "?"))

    def between(self, one: str | None, other: str | None) -> tuple[Bridge, ...]:
        """The bridges that lie between two GPUs: above one of them and not above both."""
        first, second = self.slot(one).bridges, self.slot(other).bridges
        apart = {*first} ^ {*second}
        return tuple(bridge for bridge in self.bridges if bridge.address in apart)

    def share_a_bridge(self, one: str | None, other: str | None) -> bool:
        """Whether a bridge is above both, so that traffic between them need not reach the processor."""
        return bool({*self.slot(one).bridges} & {*self.slot(other).bridges})

    def translates(self, pci: str | None) -> bool | None:
        """Whether the IOMMU translates the writes of this GPU; None if the kernel does not say."""
        slot = self.slot(pci)
        if slot.domain is not None:
            return slot.domain.upper().startswith("DMA")
        return False if slot.grouped is False else None


def surroundings(gpus: Sequence[str], proc_root: Path, sys_root: Path) -> Surroundings:
    """Describe the surroundings of the GPUs with these PCI addresses, as these roots show them."""
    slots = tuple(slot_of(address, sys_root) for address in gpus)
    above = dict.fromkeys(address for slot in slots for address in slot.bridges)
    cpu = read_pairs(proc_root / "cpuinfo", ":")
    bridges = []
    for address in above:
        config = b""
        with suppress(OSError), (sys_root / "bus" / "pci" / "devices" / address / "config").open("rb") as file:
            config = file.read(_EXTENDED_BYTES)
        bridges.append(Bridge(address, acs_control(config)))
    # x86 has a flag that hypervisors set; Xen also shows itself in sysfs.
    flags, is_xen = cpu.get("flags"), bool(names_in(sys_root / "hypervisor"))
    return Surroundings(
        virtual=is_xen or (None if flags is None else "hypervisor" in flags.split()),
        slots=slots,
        bridges=tuple(bridges),
        processor=_maker(cpu),
    )


@contextmanager
def on_local_cores(pci: str | None, sys_root: Path) -> Iterator[None]:
    """Run this thread on the cores next to a PCI device, so that memory that it allocates is of the device's NUMA node.

    As nvbandwidth does before it allocates (memcpy.cpp, HostBuffer: setOptimalCpuAffinity). Where the firmware does not
    name the node, or this process may not use its cores, nothing changes.
    """
    before = os.sched_getaffinity(0)
    if pci is not None and slot_of(pci, sys_root).numa_node is not None:
        cores = _numbers(read_text(sys_root / "bus" / "pci" / "devices" / pci / "local_cpulist") or "")
        with suppress(OSError, OverflowError):
            os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _numbers(text: str) -> set[int]:
    """Such as "0-3,8": the kernel's form of a list (bitmap_parselist); nothing of another form."""
    parts = [part.split("-") for part in text.split(",")]
    if not all(end.isdigit() for part in parts for end in part):
        return set()
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


def processor_maker(proc_root: Path) -> str | None:
    """The maker of the processors, as `Surroundings.processor`."""
    return _maker(read_pairs(proc_root / "cpuinfo", ":"))


def _maker(cpu: Mapping[str, str]) -> str | None:
    return cpu.get("vendor_id") or ("ARM" if "CPU implementer" in cpu else None)


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a PCI config space; 0 where there is no ACS, None where it cannot be read.

    Extended capabilities are a chain from 0x100 on: 16 bits of identity, 4 of version, 12 of the next one's offset (PCI
    Express Base Specification, 7.6.3; ACS is 7.7.11).
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
    return None  # a ring


def slot_of(address: str, sys_root: Path) -> Slot:
    """The slot of the device with this PCI address."""
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
        # -1 where the firmware does not say (Documentation/ABI/testing/sysfs-bus-pci).
        numa_node=node if node is not None and node >= 0 else None,
    )
