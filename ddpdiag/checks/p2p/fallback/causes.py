"""What is the likely reason that a way does not work, by the override that got around it."""

from collections.abc import Sequence
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.p2p.fallback.search import Member
from ddpdiag.checks.p2p.fallback.suspicions import suspicions
from ddpdiag.checks.p2p.paths import check as paths
from ddpdiag.model import Finding, Severity

D = TypeVar("D")

# What other checks may have seen of the same cause, and what it mostly is.
_WITNESSES = {
    "SHM": ("HST003",),
    "NVLS": ("GPU007", "GPU006"),
    "CUMEM": ("HST003",),
    "IFNAME": ("RDZ003", "RDZ002"),
}
_USUAL = {
    "P2P": "ACS or an IOMMU between the GPUs keeps direct copies from arriving (a virtual machine needs them); "
    "look for ACSCtl in `lspci -vvv`, turn ACS and the IOMMU off in the BIOS, or boot with iommu=pt",
    "SHM": "/dev/shm is too small or not shared by the ranks' containers; docker --shm-size=1g --ipc=host",
    "NVLS": "the fabric manager does not run, or has another version than the driver; "
    "`systemctl status nvidia-fabricmanager`, and reset the GPUs after a restart of it",
    "CUMEM": "a container that may not set memory policies, or uneven NUMA nodes; docker --cap-add SYS_NICE",
    "GDR": "GPUDirect RDMA does not work with this card: nvidia_peermem, or ACS on the way",
    "PLUGIN": "the network plugin that NCCL loads does not work here; look at LD_LIBRARY_PATH",
    "IB": "InfiniBand or RoCE is there and does not carry data: port state, GID, memlock, partition keys",
    "IFNAME": "NCCL chooses an interface that does not lead to the other hosts",
}


def kind_of(member: Member) -> str:
    """The rung that a member belongs to: "IFNAME" for each interface, "no" for what the user has set."""
    return member.name.partition(" ")[0]


def cause(seen: Seen[D], members: Sequence[Member], nodes: Sequence[str]) -> str:
    """A sentence on the first member: what another check saw of it, else what it mostly is; empty if it is the user's.

    What was set by the user and is taken away is its own cause. `nodes` are the hosts on which it fails, if that is
    known: what was seen on others explains nothing.
    """
    kind = next((kind for member in members if (kind := kind_of(member)) in _USUAL), None)
    if kind is None:
        return ""
    if kind == "P2P" and (said := _suspected(seen, nodes)):
        return f"Probable cause: {said}."
    seen_too = _witnessed(seen, _WITNESSES.get(kind, ()), nodes)
    if seen_too is not None:
        return f"Probable cause: {seen_too.title} ({seen_too.code}): {seen_too.message}"
    return f"Mostly, {_USUAL[kind]}."


def _suspected(seen: Seen[D], nodes: Sequence[str]) -> str:
    """What speaks for P2P to fail on the first of these hosts where something does."""
    hosts = [ranks for (name, _), ranks in seen.world.hosts.items() if not nodes or name in nodes]
    found = (suspicions(seen.of(paths.CHECK), ranks) for ranks in hosts)
    return next((said[0] for said in found if said), "")


def _witnessed(seen: Seen[D], codes: Sequence[str], nodes: Sequence[str]) -> Finding | None:
    for code in codes:
        for finding in seen.findings_of(code):
            elsewhere = nodes and finding.nodes and not set(nodes) & set(finding.nodes)
            if finding.severity is not Severity.NOTE and not elsewhere:
                return finding
    return None
