"""The connections that NCCL chooses between the GPUs of one host, and the rate of a ring over them."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

from ddpdiag.model.bench import Limits, Peer

# With one of these NCCL uses no NVLinks between hosts (init.cc: "Check for MNNVL support"; mnnvl.cc: cuMem).
_WITHOUT_MNNVL = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_CUMEM_ENABLE": "0",
}
# Where PCIe paths meet (nvml.h, nvmlGpuTopologyLevel_t): behind several switches, on different sockets.
_PXB, _SYS = 20, 50
_AMD = "AuthenticAMD"
# From this version on the number of GPUs counts (graph/paths.cc of 2.22.3 and 2.23.4).
_COUNTING = (2, 23)
# More GPUs than this are joined by switches; their cuts would be too many.
_MOST_GPUS = 10


def allows_mnnvl(variables: Mapping[str, str]) -> bool:
    """Whether these variables let NCCL use NVLinks between hosts."""
    return not any(variables.get(name) == value for name, value in _WITHOUT_MNNVL.items())


def p2p_level(processor: str | None, gpus: int, nccl: str | None = None) -> int | None:
    """The farthest at which NCCL uses P2P over PCIe; None where the processor is not known.

    No farther than behind PCIe switches; but as far as the other socket under processors of AMD, between two GPUs of
    the communicator on this host at most (graph/paths.cc, ncclTopoCheckP2p; up to 2.22 between any number of them).
    """
    if processor is None:
        return None
    counts = nccl is None or version_of(nccl) >= _COUNTING
    return _SYS if processor == _AMD and (gpus <= 2 or not counts) else _PXB


def version_of(text: str) -> tuple[float, ...]:
    """The first two numbers of NCCL's version; what cannot be read is taken to be new."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (math.inf,)


class Cut(NamedTuple):
    """The weakest division of some GPUs into two parts: what NVLinks carry between these, and whether P2P is used."""

    nvlink_bytes_per_s: float
    p2p: bool


def weakest_cut(own: Sequence[Limits]) -> Cut | None:
    """The narrowest place of a ring over these GPUs of one host; None where not all paths between them are known.

    Every ring leaves each part of them, over NVLinks where there are some, else by P2P over PCIe, else through the
    host's memory.
    """
    count = len(own)
    if not 1 < count <= _MOST_GPUS or len({limit.uuid for limit in own if limit.uuid}) < count:
        return None
    known: dict[tuple[int, int], Peer] = {}
    for a, b in combinations(range(count), 2):
        path = own[a].peers.get(own[b].uuid or "") or own[b].peers.get(own[a].uuid or "")
        if path is None:
            return None
        known[a, b] = path
    cuts = []
    # Each division into two parts once, by the part that has the first of them.
    others = chain.from_iterable(combinations(range(1, count), size) for size in range(count - 1))
    for part in (frozenset((0, *rest)) for rest in others):
        crossing = [(pair, path) for pair, path in known.items() if (pair[0] in part) is not (pair[1] in part)]
        links = sum((path.nvlinks or 0) * min(_link_rate(own[a]), _link_rate(own[b])) for (a, b), path in crossing)
        p2p = any(_is_p2p(path, own[pair[0]].processor, count) for pair, path in crossing)
        cuts.append(Cut(links, p2p))
    return min(cuts)


def _link_rate(limit: Limits) -> float:
    rate = limit.nvlink_bytes_per_s
    return rate / limit.nvlinks if rate is not None and limit.nvlinks and 0 < rate < math.inf else 0.0


def _is_p2p(path: Peer, processor: str | None, gpus: int) -> bool:
    """Whether NCCL uses P2P over PCIe. A state that NVML does not report is no reason against it."""
    most = p2p_level(processor, gpus)
    near = path.level is None or most is None or path.level <= most
    return path.p2p is not False and near
