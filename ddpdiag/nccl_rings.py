"""The connections that NCCL chooses between the GPUs of one host, and the division of the GPUs that limits a ring."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

from ddpdiag.model.bench import Limits, PeerPath

# Each setting stops NCCL from using NVLinks between hosts, MNNVL (init.cc: "Check for MNNVL support"; mnnvl.cc: cuMem).
_DISABLING_MNNVL = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_CUMEM_ENABLE": "0",
}
# NVML's levels at which PCIe paths meet (nvml.h, nvmlGpuTopologyLevel_t): several switches, and different sockets.
_PXB, _SYS = 20, 50
_AMD = "AuthenticAMD"
# From this version of NCCL on, P2P over PCIe depends on the number of GPUs (graph/paths.cc of 2.22.3 and 2.23.4).
_COUNTS_GPUS_FROM = (2, 23)
# A host with more GPUs has NVSwitches, and there would be too many divisions to try.
_MAX_GPUS = 10


def allows_mnnvl(variables: Mapping[str, str]) -> bool:
    """Whether these environment variables let NCCL use NVLinks between hosts."""
    return not any(variables.get(name) == value for name, value in _DISABLING_MNNVL.items())


def p2p_level(processor: str | None, gpu_count: int, nccl_version: str | None = None) -> int | None:
    """The highest NVML topology level at which NCCL uses P2P over PCIe; None if the processor is not known.

    NCCL uses P2P between GPUs behind common PCIe switches. With AMD processors it also uses P2P between sockets, if the
    communicator has at most two GPUs on this host (up to NCCL 2.22: any number; graph/paths.cc, ncclTopoCheckP2p).
    """
    if processor is None:
        return None
    counts_gpus = nccl_version is None or version_of(nccl_version) >= _COUNTS_GPUS_FROM
    return _SYS if processor == _AMD and (gpu_count <= 2 or not counts_gpus) else _PXB


def version_of(text: str) -> tuple[float, ...]:
    """The first two numbers of NCCL's version, for comparison. A text in another form counts as the newest version."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (math.inf,)


class Cut(NamedTuple):
    """A division of GPUs into two parts: the rate of all NVLinks between them, and whether NCCL has P2P."""

    nvlink_bytes_per_s: float
    has_p2p: bool


def weakest_cut(gpus: Sequence[Limits]) -> Cut | None:
    """The division that limits a ring over these GPUs of one host; None if not all paths are known, or above _MAX_GPUS.

    A ring crosses every division: over NVLinks if there are any, else by P2P over PCIe, else through the host's memory.
    """
    count = len(gpus)
    if not 1 < count <= _MAX_GPUS or len({limit.uuid for limit in gpus if limit.uuid}) < count:
        return None
    paths: dict[tuple[int, int], PeerPath] = {}
    for a, b in combinations(range(count), 2):
        path = gpus[a].peers.get(gpus[b].uuid or "") or gpus[b].peers.get(gpus[a].uuid or "")
        if path is None:
            return None
        paths[a, b] = path
    cuts = []
    # Each division is tried once, as the part that contains the first GPU.
    other_members = chain.from_iterable(combinations(range(1, count), size) for size in range(count - 1))
    for part in (frozenset((0, *rest)) for rest in other_members):
        crossing = [(pair, path) for pair, path in paths.items() if (pair[0] in part) is not (pair[1] in part)]
        rate = sum((path.nvlinks or 0) * min(_link_rate(gpus[a]), _link_rate(gpus[b])) for (a, b), path in crossing)
        has_p2p = any(_uses_p2p(path, gpus[pair[0]].cpu_vendor, count) for pair, path in crossing)
        cuts.append(Cut(rate, has_p2p))
    return min(cuts)


def _link_rate(limit: Limits) -> float:
    rate = limit.nvlink_bytes_per_s
    return rate / limit.nvlinks if rate is not None and limit.nvlinks and 0 < rate < math.inf else 0.0


def _uses_p2p(path: PeerPath, processor: str | None, gpu_count: int) -> bool:
    """Whether NCCL uses P2P over PCIe on this path. A value that NVML does not report is assumed to allow P2P."""
    max_level = p2p_level(processor, gpu_count)
    is_near = path.pcie_level is None or max_level is None or path.pcie_level <= max_level
    return path.p2p is not False and is_near
