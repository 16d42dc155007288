"""What lies around GPUs: ACS in config spaces built by hand, IOMMU groups, a virtual machine."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.probes.gpu import iommu

ACS, AER = 0x000D, 0x0001
RR_CR_UF = 0x001D  # as the kernel sets it, with source validation


def config(*capabilities: tuple[int, int, int], size: int = 4096, acs: int = RR_CR_UF) -> bytes:
    """A config space with these extended capabilities: (offset, identity, offset of the next)."""
    space = bytearray(4096)
    space[0:4] = b"\xb5\x10\x47\x87"
    for offset, identity, following in capabilities:
        struct.pack_into("<I", space, offset, identity | 1 << 16 | following << 20)
        if identity == ACS:
            struct.pack_into("<HH", space, offset + 4, 0x001F, acs)
    return bytes(space[:size])


@pytest.mark.parametrize(
    ("space", "control"),
    [
        pytest.param(config((0x100, AER, 0x148), (0x148, 2, 0x2A0), (0x2A0, ACS, 0)), RR_CR_UF, id="in the chain"),
        pytest.param(config((0x100, ACS, 0), acs=0x0001), 0x0001, id="at once"),
        pytest.param(config((0x100, AER, 0)), 0, id="a function without ACS"),
        pytest.param(config()[:0x100], 0, id="no extended capabilities"),
        pytest.param(b"\xff" * 4096, 0, id="a device that is gone"),
        pytest.param(config((0x100, ACS, 0), size=64), None, id="what only root may read"),
        pytest.param(config((0x100, AER, 0x148), (0x148, ACS, 0), size=0x148), None, id="cut off"),
        pytest.param(config((0x100, AER, 0xFFC)), None, id="beyond the end"),
        pytest.param(config((0x100, AER, 0x148), (0x148, 2, 0x100)), None, id="a ring"),
        pytest.param(config((0x100, AER, 0x40)), None, id="into the conventional space"),
    ],
)
def test_the_control_register_is_found_or_not_known(space, control):
    assert iommu.acs_control(space) == control


@given(st.binary(min_size=0x100, max_size=4096), st.data())
def test_any_chain_ends_in_an_answer(space, data):
    chained = bytearray(space)
    for offset in range(0x100, len(chained) - 8, 0x40):
        struct.pack_into("<I", chained, offset, AER | data.draw(st.integers(0, 0xFFF)) << 20)
    assert iommu.acs_control(bytes(chained)) in (None, 0)


@pytest.mark.parametrize(
    ("control", "redirects"),
    [(None, False), (0, False), (0x0001, False), (0x0010, False), (0x0004, True), (0x0008, True), (RR_CR_UF, True)],
)
def test_forwarding_alone_redirects_nothing(control, redirects):
    # As the kernel has it (drivers/pci/p2pdma.c): request or completion redirect, or egress control.
    assert iommu.Bridge("0000:17:01.0", control).redirects is redirects


# A board: two GPUs at one switch, a third at another root port.
ROOT, UP, DOWN_A, DOWN_B = "0000:17:01.0", "0000:18:00.0", "0000:19:00.0", "0000:19:04.0"
GPU_A, GPU_B, GPU_C, OTHER_ROOT = "0000:1a:00.0", "0000:1b:00.0", "0000:65:00.0", "0000:64:01.0"
PATHS = {
    GPU_A: f"pci0000:17/{ROOT}/{UP}/{DOWN_A}/{GPU_A}",
    GPU_B: f"pci0000:17/{ROOT}/{UP}/{DOWN_B}/{GPU_B}",
    GPU_C: f"pci0000:64/{OTHER_ROOT}/{GPU_C}",
}


def board(folder: Path, *, domain: str | None = "DMA-FQ", flags: str = "fpu vme", **acs: bytes):
    """Roots of /proc and /sys; `acs` are config spaces by the name of a bridge (root, up, a, b)."""
    proc, sys = (folder / name for name in ("proc", "sys"))
    for root in (proc, sys / "bus/pci/devices"):
        root.mkdir(parents=True)
    (proc / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for path in PATHS.values():
        (sys / "devices" / path).mkdir(parents=True)
        place = sys / "devices"
        for part in path.split("/"):
            place /= part
            link = sys / "bus/pci/devices" / part
            if not part.startswith("pci") and not link.exists():
                link.symlink_to(Path("../../../devices") / place.relative_to(sys / "devices"))
    for name, space in acs.items():
        bridge = {"root": ROOT, "up": UP, "a": DOWN_A, "b": DOWN_B, "other": OTHER_ROOT}[name]
        (sys / "bus/pci/devices" / bridge / "config").write_bytes(space)
    if domain is not None:
        for number, gpu in enumerate(PATHS):
            group = sys / "kernel/iommu_groups" / str(number)
            group.mkdir(parents=True)
            (group / "type").write_text(f"{domain}\n")
            (sys / "bus/pci/devices" / gpu / "iommu_group").symlink_to(group)
    return proc, sys


def around(folder: Path, **facts) -> iommu.PcieTopology:
    return iommu.read_pcie_topology(list(PATHS), *board(folder, **facts))


def test_bridges_between_two_gpus_are_those_above_one_of_them(tmp_path):
    on, off = config((0x100, ACS, 0)), config((0x100, ACS, 0), acs=0)
    found = around(tmp_path, root=on, up=off, a=on, b=off)
    assert found.slot(GPU_A).bridges == (ROOT, UP, DOWN_A)
    assert found.bridges_between(GPU_A, GPU_B) == (iommu.Bridge(DOWN_A, RR_CR_UF), iommu.Bridge(DOWN_B, 0))
    assert [bridge.address for bridge in found.bridges_between(GPU_A, GPU_C)] == [ROOT, UP, DOWN_A, OTHER_ROOT]
    assert (found.share_a_bridge(GPU_A, GPU_B), found.share_a_bridge(GPU_A, GPU_C)) == (True, False)
    assert found.bridges_between("0000:99:00.0", None) == ()


@pytest.mark.parametrize(
    ("domain", "translates"), [("DMA", True), ("DMA-FQ", True), ("identity", False), ("", None), (None, False)]
)
def test_whether_the_iommu_translates_is_told_by_the_group_of_the_gpu(tmp_path, domain, translates):
    assert around(tmp_path, domain=domain).translates(GPU_A) is translates


def test_a_virtual_machine_shows_itself(tmp_path):
    assert around(tmp_path / "metal").virtual is False
    assert around(tmp_path / "guest", flags="fpu hypervisor").virtual is True
    proc, sys = board(tmp_path / "arm")
    (proc / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n")
    assert iommu.read_pcie_topology([], proc, sys).virtual is None
    assert iommu.read_pcie_topology([], proc, sys).processor == "ARM"
    (sys / "hypervisor").mkdir()
    (sys / "hypervisor/type").write_text("xen\n")
    assert iommu.read_pcie_topology([], proc, sys).virtual is True


@pytest.mark.parametrize(
    ("node", "cores", "bound"),
    [("1", "{last},100000-100003", True), ("-1", "{last}", False), ("1", "100000-100003", False), ("1", "", False)],
    ids=["near", "unknown node", "cores of others", "no cores"],
)
def test_memory_for_a_gpu_is_allocated_on_the_cores_of_its_node(tmp_path, node, cores, bound):
    _, sys = board(tmp_path)
    before = os.sched_getaffinity(0)
    device = sys / "bus/pci/devices" / GPU_A
    (device / "numa_node").write_text(f"{node}\n")
    (device / "local_cpulist").write_text(f"{cores.format(last=max(before))}\n")
    with iommu.on_local_cores(GPU_A, sys):
        assert os.sched_getaffinity(0) == ({max(before)} if bound else before)
    assert os.sched_getaffinity(0) == before
    with iommu.on_local_cores(None, sys):
        assert os.sched_getaffinity(0) == before


def test_the_processors_maker_is_told_as_the_kernel_does(tmp_path):
    proc, sys = board(tmp_path)
    assert iommu.read_pcie_topology([], proc, sys).processor is None
    (proc / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu\n")
    assert iommu.read_pcie_topology([], proc, sys).processor == iommu.processor_maker(proc) == "GenuineIntel"


def test_a_host_that_shows_nothing_is_no_error(tmp_path):
    found = iommu.read_pcie_topology(["0000:1a:00.0"], tmp_path / "p", tmp_path / "s")
    assert (found.bridges, found.virtual) == ((), None)
    assert found.translates("0000:1a:00.0") is None
