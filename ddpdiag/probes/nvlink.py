"""What connects a GPU: its NVLinks and its PCIe slot, as NVML shows them. Only a worker calls this.

Rates are what NCCL's own model counts in one direction (topo.h and topo.cc of NCCL 2.28): a NVLink by the generation of
the GPU, PCIe by generation and width.
"""

from collections.abc import Sequence

from msgspec import Struct

from ddpdiag.probes.nvml import supported

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
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        up, known = _links(handle)
        return Connections(
            nvlinks=len(up) if known else None,
            nvlinks_max=known or None,
            nvlink_switched=_switched(handle, up),
            nvlink_bytes_per_s=len(up) * nvlink_rate(capability) if up else None,
            pcie_bytes_per_s=_pcie(handle, "Max"),
            pcie_now_bytes_per_s=_pcie(handle, "Curr"),
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


def _links(handle: object) -> tuple[list[int], int]:
    """The numbers of the links that are up, and how many the GPU has."""
    import pynvml

    states = [
        supported(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[misc]
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    ]
    known = [state for state in states if state is not None]
    return [link for link, state in enumerate(states) if state], len(known)


def _switched(handle: object, up: Sequence[int]) -> bool | None:
    """Do all of these links lead to a switch? None if there is none, or one does not say."""
    import pynvml

    kinds = [
        supported(lambda link=link: pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))  # type: ignore[misc]
        for link in up
    ]
    if not kinds or None in kinds:
        return None
    return all(kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH for kind in kinds)


def _pcie(handle: object, which: str) -> float | None:
    import pynvml

    generation = supported(lambda: int(getattr(pynvml, f"nvmlDeviceGet{which}PcieLinkGeneration")(handle)))
    width = supported(lambda: int(getattr(pynvml, f"nvmlDeviceGet{which}PcieLinkWidth")(handle)))
    return pcie_rate(generation, width) if generation and width else None
