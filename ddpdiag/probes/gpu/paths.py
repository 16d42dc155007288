"""The paths between the GPUs of a host as NVML reports them: PCIe, NVLink, and whether peer-to-peer (P2P) is allowed.

Only a worker calls these functions, since any NVML query may hang on a faulty GPU. A value that the GPU does not report
is None. If a container shows each rank only its own GPU, NVML reports no pairs of GPUs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import IntEnum

from msgspec import Struct

from ddpdiag.model.bench import PeerPath
from ddpdiag.model.trial import NVML_STEP
from ddpdiag.probes.gpu.links import TO_GPU, TO_SWITCH, TO_UNKNOWN, link_end, link_states
from ddpdiag.probes.gpu.nvml import Device, Gpu, NvmlError, opened_gpus, opened_nvml, sysfs_address

# nvml.h, nvmlGpuP2PCapsIndex_t (pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple).
_READ, _WRITE, _NVLINK = 0, 1, 2
# The PCI domain of devices that a virtual machine hides. NCCL assumes that they are NVSwitches (src/graph/xml.cc).
_HIDDEN = "fffffff"


class Level(IntEnum):
    """The level at which the PCIe paths of two GPUs meet (nvml.h, nvmlGpuTopologyLevel_t).

    The names are those of `nvidia-smi topo -m`: within one board (a card with two GPUs), at one PCIe switch, behind
    several switches, at a host bridge, between host bridges of one NUMA node, between sockets.
    """

    PSB = 0
    PIX = 10
    PXB = 20
    PHB = 30
    NODE = 40
    SYS = 50


class P2P(IntEnum):
    """Whether one GPU may reach another GPU's memory (nvml.h, nvmlGpuP2PStatus_t)."""

    OK = 0
    CHIPSET_NOT_SUPPORTED = 1
    GPU_NOT_SUPPORTED = 2
    TOPOLOGY_NOT_SUPPORTED = 3
    DISABLED_BY_REGKEY = 4
    NOT_SUPPORTED = 5
    UNKNOWN = 6

    @classmethod
    def _missing_(cls, value: object) -> "P2P":
        return cls.UNKNOWN  # a number that only newer drivers use


class GpuPath(Struct, frozen=True, kw_only=True, array_like=True):
    """The path from one GPU to another, both given as NVML's index. `level` is a `Level`, the last three are `P2P`.

    `nvlinks` counts the links of `source` that are up and lead to `target`, or to NVSwitches that `target` uses as
    well. A path is recorded as a list of its fields, so new fields must be added at the end.
    """

    source: int
    target: int
    level: int | None = None
    nvlinks: int | None = None
    read: int | None = None
    write: int | None = None
    nvlink: int | None = None


class Paths(Struct, frozen=True, kw_only=True):
    """The GPUs of a host, and the paths between all pairs in both directions; or `error` if NVML failed."""

    gpus: tuple[Gpu, ...] = ()
    paths: tuple[GpuPath, ...] = ()
    error: str | None = None


class _LinkEnds(Struct, frozen=True, kw_only=True):
    """The number of one GPU's NVLinks that lead to each GPU (by PCI address), to switches, and to unknown devices."""

    direct: Mapping[str, int]
    switched: int
    unknown: int


def gpu_paths(step: Callable[[str], None]) -> Paths:
    """Query NVML for every pair of GPUs. `step` announces each GPU before its queries, which may hang."""
    try:
        step(NVML_STEP)
        with opened_nvml() as pynvml:
            opened = list(opened_gpus(pynvml, step))
            devices = [(gpu, device) for gpu, device in opened if device is not None]
            return Paths(gpus=tuple(gpu for gpu, _ in opened), paths=tuple(_paths(devices, step)))
    except NvmlError as error:
        return Paths(error=str(error))


def peers_of(uuid: str, others: Sequence[str]) -> dict[str, PeerPath]:
    """Query the paths from the GPU with this UUID to others, by UUID; empty if NVML fails for any of them."""
    peers: dict[str, PeerPath] = {}
    try:
        with opened_nvml() as pynvml:
            devices = {key: Device(pynvml.nvmlDeviceGetHandleByUUID(key)) for key in dict.fromkeys((uuid, *others))}
            pcis = {key: device.pci() for key, device in devices.items()}
            links = {key: _link_ends(device, frozenset(filter(None, pcis.values()))) for key, device in devices.items()}
            source = devices.pop(uuid)
            for other, device in devices.items():
                statuses = [source.pair_number("nvmlDeviceGetP2PStatus", device, caps) for caps in (_READ, _WRITE)]
                known = [status for status in statuses if status not in (None, P2P.UNKNOWN)]
                peers[other] = PeerPath(
                    nvlinks=_count_nvlinks(links[uuid], links[other], pcis[other]),
                    pcie_level=source.pair_number("nvmlDeviceGetTopologyCommonAncestor", device),
                    p2p=all(status == P2P.OK for status in known) if known else None,
                )
    except (NvmlError, OSError):
        return {}
    return peers


def _paths(devices: Sequence[tuple[Gpu, Device]], step: Callable[[str], None]) -> Iterator[GpuPath]:
    gpu_addresses = frozenset(gpu.pci for gpu, _ in devices if gpu.pci)
    links = {}
    for gpu, device in devices:
        step(f"NVLinks of GPU {gpu.index} (PCI {gpu.pci})")
        links[gpu.index] = _link_ends(device, gpu_addresses)
    for source, device in devices:
        step(f"ways from GPU {source.index} (PCI {source.pci})")
        for target, other in devices:
            if source.index != target.index:
                read, write, nvlink = (
                    device.pair_number("nvmlDeviceGetP2PStatus", other, caps) for caps in (_READ, _WRITE, _NVLINK)
                )
                yield GpuPath(
                    source=source.index,
                    target=target.index,
                    level=device.pair_number("nvmlDeviceGetTopologyCommonAncestor", other),
                    nvlinks=_count_nvlinks(links[source.index], links[target.index], target.pci),
                    read=read,
                    write=write,
                    nvlink=nvlink,
                )


def _link_ends(device: Device, gpu_addresses: Set[str]) -> _LinkEnds:
    direct: Counter[str] = Counter()
    switched = unknown = 0
    for link in (number for number, is_up in link_states(device).items() if is_up):
        kind = link_end(device, link)
        remote = _remote_address(device, link)
        if kind == TO_SWITCH or (remote or "").startswith(_HIDDEN):
            switched += 1
        elif remote is not None and (remote in gpu_addresses or kind == TO_GPU):
            direct[remote] += 1
        elif kind in (TO_GPU, TO_UNKNOWN, None):
            unknown += 1
    return _LinkEnds(direct=direct, switched=switched, unknown=unknown)


def _remote_address(device: Device, link: int) -> str | None:
    import pynvml

    return device.query(lambda handle: sysfs_address(str(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))


def _count_nvlinks(source: _LinkEnds, target: _LinkEnds, pci: str | None) -> int | None:
    """Count the NVLinks from `source` to `target` (at `pci`), also by switches. None if 0 and some ends are unknown."""
    count = source.direct.get(pci or "", 0) + min(source.switched, target.switched)
    return None if count == 0 and source.unknown else count
