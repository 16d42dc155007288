"""On which hosts a backend fails, and the probable cause, by the override that avoids it."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors, nvswitch, present
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.host import shared_memory
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.fallback.search import Ended, Ground, Member, Part, Tried
from ddpdiag.checks.p2p.host_paths import (
    Data,
    HostPaths,
    addresses,
    gpus_of,
    hides_acs,
    host_paths,
    pairs_text,
    redirecting,
    said_of_pairs,
)
from ddpdiag.checks.registry import by_code
from ddpdiag.model import Severity, Status
from ddpdiag.probes.gpu.links import JOINED
from ddpdiag.probes.gpu.paths import Level

# What other checks may have seen of the same cause, and what it mostly is.
_CHECKS_THAT_SEE_IT = {
    "SHM": ("HST003",),
    "NVLS": ("GPU007", "GPU006"),
    "IFNAME": ("RDZ003", "RDZ002"),
}
_USUAL = {
    "P2P": "ACS or an IOMMU blocks direct copies between the GPUs. Look for ACSCtl in `lspci -vvv` (as root), turn "
    "ACS and the IOMMU off in the BIOS, or boot with iommu=pt; a virtual machine needs them on",
    "SHM": "/dev/shm is too small, or the ranks' containers do not share it. Use docker --shm-size=1g --ipc=host",
    "NVLS": "the fabric manager does not run, or its version is not the driver's. Run `systemctl status "
    "nvidia-fabricmanager`, and reset the GPUs after a restart of it",
    "CUMEM_HOST": "GPUs without peer access (NCCL issue 1838; a later NCCL or driver may not need it), "
    "a container without permission to set memory policies (docker --cap-add SYS_NICE), or uneven NUMA nodes",
    "CUMEM": "the driver cannot share device memory between these processes. Compare the control groups and containers "
    "of the ranks (GPU001), and try another driver",
    "GDR": "GPUDirect RDMA does not work with this card: nvidia_peermem, or ACS on the path",
    "PLUGIN": "the network plugin that NCCL loads does not work here. Check LD_LIBRARY_PATH",
    "IB": "InfiniBand or RoCE is present and carries no data. Check port state and GID (`ibv_devinfo -v`), the limit "
    "of locked memory (`ulimit -l`) and partition keys",
    "IFNAME": "NCCL chooses an interface that does not reach the other hosts (RDZ003)",
}

# The remaining causes where a check has looked at the usual one and found nothing.
_CLEARED = {
    "SHM": "/dev/shm has room (HST003): check whether the ranks' containers share it (docker --ipc=host).",
    "NVLS": "All GPUs have joined their NVSwitch fabric (GPU007): compare the version of nvidia-fabricmanager with the "
    "driver's, and look for SXid lines in `dmesg`.",
}
# What NCCL's ranks do, and copies within one process do not (transport/p2p.cc).
_BETWEEN_PROCESSES = (
    "Not ACS or the IOMMU: {copies} between the GPUs arrived right inside one process (P2P002). NCCL's ranks open each "
    "other's memory from process to process (CUDA IPC or cuMem): compare the IPC and PID namespaces of their "
    "containers, and look for Xid lines in `dmesg`."
)


def cause(seen: Seen[Any], members: Sequence[Member], nodes: Sequence[str]) -> str:
    """A sentence on the first member: what another check saw of it, else what it mostly is; empty if it is the user's.

    What was set by the user and is taken away is its own cause. `nodes` are the hosts on which it fails, if that is
    known: what was seen on others explains nothing.
    """
    # "IFNAME eth0" is one of several interfaces, "no NCCL_ALGO" what the user has set.
    kinds = [member.name.partition(" ")[0] for member in members]
    kind = next((kind for kind in kinds if kind in _USUAL), None)
    if kind is None:
        return ""
    if kind == "P2P":
        hosts = [ranks for (name, _), ranks in seen.world.hosts.items() if not nodes or name in nodes]
        right = _right_copies(seen, hosts)
        found = (suspicions(seen.of(paths.CHECK), ranks, copied=bool(right)) for ranks in hosts)
        if said := next(filter(None, found), ()):
            return f"Probable cause: {said[0]}."
        if right:
            return _BETWEEN_PROCESSES.format(copies="1 direct copy" if right == 1 else f"{right} direct copies")
    for finding in chain.from_iterable(map(seen.findings_of, _CHECKS_THAT_SEE_IT.get(kind, ()))):
        elsewhere = nodes and finding.hosts and not set(nodes) & set(finding.hosts)
        if finding.severity is not Severity.NOTE and not elsewhere:
            return f"Probable cause: {finding.title} ({finding.code}): {finding.message}"
    cards = cards_of(seen.of(memory_errors.CHECK)) if kind == "NVLS" else ()
    joined = bool(cards) and all(card.health.fabric.state == JOINED for card in cards)
    cleared = joined or (kind == "SHM" and bool(seen.of(shared_memory.CHECK).by_rank))
    return _CLEARED[kind] if cleared else f"Usual cause: {_USUAL[kind]}."


def _right_copies(seen: Seen[Any], hosts: Sequence[Sequence[int]]) -> int:
    """How many direct copies between GPUs of these hosts P2P002 made; 0 unless all of them ended and were right."""
    copies = seen.of(by_code("P2P002"))
    ranks = frozenset(chain.from_iterable(hosts))
    pairs = [pair for row in copies.rows_so_far if row.place.rank in ranks for pair in row.data.pairs if pair.access]
    ended = all(outcome.status is Status.DONE for outcome in copies.outcomes if outcome.rank in ranks)
    return len(pairs) if ended and not any(pair.wrong for pair in pairs) else 0


def suspicions(seen: Seen[Data], host_ranks: Sequence[int], *, copied: bool = False) -> tuple[str, ...]:
    """Reasons on the host of these ranks for P2P to fail, one sentence each without a full stop, likeliest first.

    Empty where nothing was found, or nothing was looked at. `seen` is that of P2P001 (`seen.of(p2p001.CHECK)`). With
    `copied`, direct copies arrived right, so that nothing on the PCIe paths keeps them from it.
    """
    ranks = frozenset(host_ranks)
    said: list[str] = []
    # GPU007's own words: without the fabric manager CUDA does not start, and NVLinks carry nothing.
    cards = (card for card in cards_of(seen.of(memory_errors.CHECK)) if ranks & {*card.host.ranks})
    if faults := [(card, fault) for card in cards for fault in nvswitch.joined(card)]:
        card, fault = faults[0]
        more = f" (and {len(faults) - 1} more GPUs)" if len(faults) > 1 else ""
        said.append(f"{card.label}{more}: {fault.said}; look at nvidia-fabricmanager on {card.host.name}")
    said += _isolation(seen, ranks)
    if paths_here := next((own for own in host_paths(seen) if ranks & {*own.host.ranks}), None):
        said += [*said_of_pairs(seen, paths_here), *(() if copied else _pcie(paths_here))]
    # What NCCL takes instead of P2P, and for setting it up.
    shm = (own for own in seen.findings_of("HST003") if own.severity is not Severity.NOTE and ranks & {*own.ranks})
    return (*said, *(finding.message.removesuffix(".") for finding in shm))


def _isolation(seen: Seen[Data], ranks: frozenset[int]) -> Iterator[str]:
    """A device that a control group hides cannot be opened by its peer; CUDA_VISIBLE_DEVICES alone does no harm."""
    rows = {rank: row for rank, row in seen.of(present.CHECK).by_rank.items() if rank in ranks}
    shown = {rank: {gpu.uuid or str(gpu.index) for gpu in row.nvml.gpus} for rank, row in rows.items()}
    every = {gpu for own in shown.values() for gpu in own}
    fewest = min(map(len, shown.values()), default=0)
    if 0 < fewest < len(every):
        yield (
            f"a control group (Slurm's --gpus-per-task or --gpu-bind, or a container) shows a rank only {fewest} of "
            f"{len(every)} GPUs of its host, so that CUDA may fail to open its peers' memory"
        )


def _pcie(paths_here: HostPaths) -> Iterator[str]:
    """What is on the PCIe paths; it does not concern NVLinks."""
    around, host = paths_here.around, paths_here.host.name
    pairs = [pair for pair in paths_here.pairs if not pair.is_linked]
    if not pairs:
        return
    # A virtual machine needs ACS.
    found = {} if around.virtual else redirecting(paths_here, pairs)
    if found:
        first = next(iter(found.values()))
        noun = "bridge" if len(found) == 1 else "bridges"
        yield f"ACS redirects traffic on PCI {noun} {addresses(found)} (between {pairs_text(first)})"
    if around.virtual:
        yield f"{host} is a virtual machine, in which P2P needs ACS with address translation (ATS) set up by the host"
    if any(around.translates(gpu.pci) for gpu in gpus_of(pairs)):
        hidden = (
            "; only root can see whether ACS redirects traffic" if not found and hides_acs(paths_here, pairs) else ""
        )
        yield f"the IOMMU translates addresses for the GPUs of {host} (boot with iommu=pt){hidden}"
    elif any(around.slot(gpu.pci).grouped and around.translates(gpu.pci) is None for gpu in gpus_of(pairs)):
        yield f"an IOMMU is on at {host}, and the kernel does not report whether it translates"
    if distant_pairs := [pair for pair in pairs if pair.level is Level.SYS]:
        yield f"{pairs_text(distant_pairs)} are on different sockets (SYS); not all mainboards carry P2P between them"


class Places(NamedTuple):
    """Where it fails: in words (" between hosts"), the hosts, and the ranks of one that fails while others work."""

    text: str = ""
    hosts: tuple[str, ...] = ()
    concerned: tuple[int, ...] = ()


def places(seen: Seen[Any], tried: Sequence[Tried], end: Ended, ground: Ground) -> Places:
    """The hosts inside which it fails, as far as the search has separated them."""
    if len(ground.hosts) == 1:
        hosts = seen.world.hosts_of([ground.hosts[0][0]])
        return Places(f" on {hosts[0]}", hosts=hosts)
    if end.inside_works:
        return Places(" between hosts and works inside each host")
    if max(map(len, ground.hosts)) == 1:
        return Places(" between hosts")
    inside = next((own for own in tried if own.step.part is Part.HOSTS and not own.step.members), None)
    if inside is None or not inside.failed or not inside.busbws:
        return Places()
    ranks = tuple(sorted(rank for group in inside.failed for rank in group))
    nodes = seen.world.hosts_of(ranks)
    return Places(f" inside {names_text(nodes)} and works inside the other hosts", nodes, ranks)
