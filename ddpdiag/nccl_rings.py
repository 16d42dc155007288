"""The connections that NCCL chooses between the GPUs of one host, and the rate of a ring over them."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

from ddpdiag.model.bench import Limits, PeerPath

# With any of these values NCCL uses no NVLinks between hosts (init.cc: "Check for MNNVL support"; mnnvl.cc: cuMem).
_WITHOUT_MNNVL = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_CUMEM_ENABLE": "0",
}
# NVML's levels at which PCIe paths meet (nvml.h, nvmlGpuTopologyLevel_t): several switches, and different sockets.
_PXB, _SYS = 20, 50
_AMD = "AuthenticAMD"
# Since this version P2P over PCIe depends on the number of GPUs (graph/paths.cc of 2.22.3 and 2.23.4).
_COUNTING = (2, 23)
# With more GPUs, a host has NVSwitches, and there are too many divisions to try.
_MOST_GPUS = 10


def allows_mnnvl(variables: Mapping[str, str]) -> bool:
    """Whether these variables let NCCL use NVLinks between hosts."""
    return not any(variables.get(name) == value for name, value in _WITHOUT_MNNVL.items())


def p2p_level(processor: str | None, gpus: int, nccl: str | None = None) -> int | None:
    """The farthest level (NVML's number) at which NCCL uses P2P over PCIe; None if the processor is not known.

    NCCL uses P2P behind PCIe switches. With processors of AMD it also uses P2P between sockets, if the communicator has
    at most two GPUs on this host (up to NCCL 2.22: any number; graph/paths.cc, ncclTopoCheckP2p).
    """
    if processor is None:
        return None
    counts = nccl is None or version_of(nccl) >= _COUNTING
    return _SYS if processor == _AMD and (gpus <= 2 or not counts) else _PXB


def version_of(text: str) -> tuple[float, ...]:
    """The first two numbers of NCCL's version. A text that cannot be parsed counts as newer than all versions."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (math.inf,)


class Cut(NamedTuple):
    """A division of GPUs into two parts: the rate of the NVLinks between the parts, and whether NCCL uses P2P there."""

    nvlink_bytes_per_s: float
    p2p: bool


def weakest_cut(gpus: Sequence[Limits]) -> Cut | None:
    """The division that limits a ring over these GPUs of one host; None if not all paths between them are known.

    A ring crosses every division: over NVLinks if there are any, else by P2P over PCIe, else through the host's memory.
    """
    count = len(gpus)
    if not 1 < count <= _MOST_GPUS or len({limit.uuid for limit in gpus if limit.uuid}) < count:
        return None
    known: dict[tuple[int, int], PeerPath] = {}
    for a, b in combinations(range(count), 2):
        path = gpus[a].peers.get(gpus[b].uuid or "") or gpus[b].peers.get(gpus[a].uuid or "")
        if path is None:
            return None
        known[a, b] = path
    cuts = []
    # Each division once, by the part that contains the first GPU.
    others = chain.from_iterable(combinations(range(1, count), size) for size in range(count - 1))
    for part in (frozenset((0, *rest)) for rest in others):
        crossing = [(pair, path) for pair, path in known.items() if (pair[0] in part) is not (pair[1] in part)]
        links = sum((path.nvlinks or 0) * min(_link_rate(gpus[a]), _link_rate(gpus[b])) for (a, b), path in crossing)
        p2p = any(_is_p2p(path, gpus[pair[0]].cpu_vendor, count) for pair, path in crossing)
        cuts.append(Cut(links, p2p))
    return min(cuts)


def _link_rate(limit: Limits) -> float:
    rate = limit.nvlink_bytes_per_s
    return rate / limit.nvlinks if rate is not None and limit.nvlinks and 0 < rate < math.inf else 0.0


def _is_p2p(path: PeerPath, processor: str | None, gpus: int) -> bool:
    """Whether NCCL uses P2P over PCIe. A state or level that NVML does not report is no reason against it."""
    most = p2p_level(processor, gpus)
    near = path.pcie_level is None or most is None or path.pcie_level <= most
    return path.p2p is not False and near
