"""What connects a GPU: its NVLinks and its PCIe slot, as NVML shows them. Only a worker calls this.

Rates are what NCCL's own model counts in one direction (topo.h and topo.cc of NCCL 2.28): a NVLink by the generation of
the GPU, PCIe by generation and width.
"""

from collections.abc import Sequence

from msgspec import Struct

from ddpdiag.probes.gpu_device import Device
from ddpdiag.probes.gpu_links import TO_SWITCH, link_end, link_states

# GB/s of one link by compute capability, the highest that is not above the GPU's (NCCL, src/graph/topo.h).
_NVLINK = ((60, 18e9), (70, 20e9), (80, 20e9), (86, 12e9), (90, 20.6e9), (100, 40.1e9))
# One PCIe lane by generation, in 100 Mbit/s, less its overhead (topo.cc, kvDictPciGen; width x speed / 80 is GB/s).
_PCIE = {1: 15, 2: 30, 3: 60, 4: 120, 5: 240, 6: 480}


class Connections(Struct, frozen=True, kw_only=True):
    """One GPU's ways out; None is what it does not say. Rates are bytes per second in one direction.

    `nvlink_switched`: do all links that are up lead to a switch? Else they lead to one other GPU each, and not all GPUs
    of a host need be next to each other.
    """

    nvlinks: int | None = None
    nvlinks_max: int | None = None
    nvlink_switched: bool | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    pcie_now_bytes_per_s: float | None = None


def connections(uuid: str, capability: tuple[int, int]) -> Connections:
    """What NVML says of the GPU with this UUID; nothing where it says nothing."""
    try:
        import pynvml
    except (ImportError, OSError):
        return Connections()
    try:
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError):
        return Connections()
    try:
        device = Device(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        states = link_states(device)
        up = [number for number, is_up in states.items() if is_up]
        return Connections(
            nvlinks=len(up) if states else None,
            nvlinks_max=len(states) or None,
            nvlink_switched=_switched([link_end(device, number) for number in up]),
            nvlink_bytes_per_s=len(up) * nvlink_rate(capability) if up else None,
            pcie_bytes_per_s=_pcie(device, "Max"),
            pcie_now_bytes_per_s=_pcie(device, "Curr"),
        )
    except pynvml.NVMLError:
        return Connections()
    finally:
        pynvml.nvmlShutdown()


def nvlink_rate(capability: tuple[int, int]) -> float:
    """Bytes per second of one link in one direction."""
    number = capability[0] * 10 + capability[1]
    return max((entry for entry in _NVLINK if entry[0] <= number), default=_NVLINK[0])[1]


def pcie_rate(generation: int, width: int) -> float | None:
    """Bytes per second of a slot in one direction, as NCCL counts it (16 lanes of generation 4: 24 GB/s)."""
    return width * _PCIE[generation] / 80 * 1e9 if generation in _PCIE and width > 0 else None


def _switched(ends: Sequence[int | None]) -> bool | None:
    """Do all of these links lead to a switch? None if there is none, or one does not say."""
    return None if not ends or None in ends else all(end == TO_SWITCH for end in ends)


def _pcie(device: Device, which: str) -> float | None:
    generation = device.number(f"nvmlDeviceGet{which}PcieLinkGeneration")
    width = device.number(f"nvmlDeviceGet{which}PcieLinkWidth")
    return pcie_rate(generation, width) if generation and width else None
