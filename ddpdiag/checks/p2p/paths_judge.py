"""Findings of P2P001: pairs of GPUs that NVML does not allow P2P, or that differ from others; ACS and the IOMMU."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.p2p.host_paths import Data, HostPaths, Pair, gpus_of, host_paths, label, pairs_text, words
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.iommu import Bridge
from ddpdiag.probes.gpu.paths import P2P, PathGpu

# What holds of a pair however it is connected, as `P2P` numbers: cards or board that are not made for it.
_UNSUPPORTED = (P2P.CHIPSET_NOT_SUPPORTED, P2P.GPU_NOT_SUPPORTED, P2P.TOPOLOGY_NOT_SUPPORTED, P2P.NOT_SUPPORTED)
_LISTED = 64
_BRIDGES_SHOWN = 4


@lru_cache(maxsize=1)
def odd_pairs(seen: Seen[Data]) -> frozenset[Pair]:
    """Pairs that are not allowed, although more than half of those of their kind are.

    Of a kind are pairs of the same models that are connected in the same way, on whatever host. One whose directions
    differ is no vote.
    """
    kinds = defaultdict(list)
    for pair in (pair for paths in host_paths(seen) for pair in paths.pairs):
        if pair.works is not None and not pair.is_asymmetric:
            kinds[pair.kind].append(pair)
    return frozenset(
        pair
        for pairs in kinds.values()
        if 2 * sum(bool(pair.works) for pair in pairs) > len(pairs)
        for pair in pairs
        if not pair.works
    )


def disabled(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """Pairs that could do P2P and may not: switched off in the driver, or unlike the others."""
    odd = odd_pairs(seen)
    pairs = [pair for pair in paths.pairs if not pair.is_asymmetric and (pair in odd or _is_switched_off(pair))]
    if not pairs:
        return
    gpu = _common(paths, pairs)
    switched_off = any(map(_is_switched_off, pairs))
    whose = f"; all of them include {label(gpu)}" if gpu is not None else ""
    expected = (
        "it is switched off in the driver"
        if switched_off
        else "it is allowed for more than half of the pairs of these models with the same connection"
    )
    yield seen.finding(
        "disabled",
        "P2P is not allowed between GPUs",
        f"{paths.host.name}: P2P is not allowed for {len(pairs)} of {len(paths.pairs)} pairs of GPUs "
        f"({pairs_text(pairs)}: {_reasons(pairs)}){whose}; {expected}. NCCL uses shared memory there.",
        nodes=(paths.host.name,),
        gpus=(gpu.uuid,) if gpu is not None and gpu.uuid else (),
        links=[f"{paths.host.name}: GPU {pair.one.index} <-> GPU {pair.other.index}" for pair in pairs],
        evidence={
            "pairs": [f"{pair.name}: {_reasons([pair])}" for pair in pairs[:_LISTED]],
            "gpus": [label(member) for member in gpus_of(pairs)],
        },
        fix=f"Look at `nvidia-smi topo -p2p r` and `topo -m` on {paths.host.name}; "
        + (
            "remove the key from NVreg_RegistryDwords (/proc/driver/nvidia/params shows it) and reload the driver."
            if switched_off
            else "compare slots, bridges and BIOS settings with those of the other pairs."
        ),
    )


def _is_switched_off(pair: Pair) -> bool:
    return P2P.DISABLED_BY_REGKEY in pair.statuses


def _common(paths: HostPaths, pairs: Sequence[Pair]) -> PathGpu | None:
    """The one GPU that is in each of several pairs, and in no pair that is allowed."""
    if len(pairs) < 2:
        return None
    for gpu in (pairs[0].one, pairs[0].other):
        own = [pair for pair in paths.pairs if gpu in (pair.one, pair.other)]
        if all(gpu in (pair.one, pair.other) for pair in pairs) and not any(pair.works for pair in own):
            return gpu
    return None


def asymmetric(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """Pairs of which one direction is allowed and the other is not."""
    pairs = [pair for pair in paths.pairs if pair.is_asymmetric]
    if pairs:
        closed = [(pair, *_closed(pair)) for pair in pairs]
        yield seen.finding(
            "asymmetric",
            "P2P is allowed in one direction only",
            f"{paths.host.name}: "
            + "; ".join(
                f"P2P from {label(source)} to {label(target)} is not allowed ({_reasons([pair])}), but the other "
                "direction is"
                for pair, source, target in closed[:4]
            )
            + (f"; {len(closed) - 4} more pairs" if len(closed) > 4 else "")
            + "; both directions expected.",
            nodes=(paths.host.name,),
            links=[f"{paths.host.name}: GPU {source.index} -> GPU {target.index}" for _, source, target in closed],
            evidence={"gpus": [label(gpu) for gpu in gpus_of(pairs)]},
            fix=f"Look at `nvidia-smi topo -p2p r` and `topo -p2p w` on {paths.host.name}, and reset these GPUs; "
            "set NCCL_P2P_DISABLE=1 if copies fail.",
        )


def _closed(pair: Pair) -> tuple[PathGpu, PathGpu]:
    """Source and target of the direction that is not allowed."""
    there, _ = pair.statuses
    return (pair.one, pair.other) if there is not P2P.OK else (pair.other, pair.one)


def refused(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """Pairs without NVLinks that do not support P2P."""
    odd = odd_pairs(seen)
    pairs = [
        pair
        for pair in paths.unlinked
        if pair.statuses and all(status in _UNSUPPORTED for status in pair.statuses) and pair not in odd
    ]
    if pairs:
        yield seen.finding(
            "no-p2p",
            "P2P is not supported between GPUs",
            f"{paths.host.name}: NVML reports that {len(pairs)} of {len(paths.unlinked)} pairs of GPUs without NVLinks "
            f"cannot do P2P ({pairs_text(pairs)}: {_reasons(pairs)}). NCCL uses shared memory of the host there: "
            "expect its bandwidth.",
            nodes=(paths.host.name,),
            evidence={"pairs": len(pairs), "gpus": [label(gpu) for gpu in gpus_of(pairs)]},
            fix="Do nothing if these cards do not support P2P (most consumer cards do not).",
        )


def _reasons(pairs: Sequence[Pair]) -> str:
    """Why these may not, each reason once: "chipset not supported"."""
    found = dict.fromkeys(status for pair in pairs for status in pair.statuses if status is not P2P.OK)
    return ", ".join(map(words, found))


def said_of_pairs(seen: Seen[Data], paths: HostPaths) -> Iterator[str]:
    """Reasons in this for P2P to fail on that host, as sentences."""
    odd = odd_pairs(seen)
    for pairs, why in (
        ([pair for pair in paths.pairs if _is_switched_off(pair)], "is switched off in the driver (registry key)"),
        ([pair for pair in paths.pairs if pair.is_asymmetric], "is allowed by NVML in one direction only"),
        ([pair for pair in paths.pairs if pair in odd and not _is_switched_off(pair)], "is not allowed by NVML"),
    ):
        if pairs:
            yield f"P2P {why} for {pairs_text(pairs)}"


def redirecting(paths: HostPaths, pairs: Iterable[Pair]) -> dict[Bridge, list[Pair]]:
    """Bridges between these GPUs on which ACS redirects, with the pairs that each concerns."""
    found: dict[Bridge, list[Pair]] = {}
    for pair in pairs:
        for bridge in paths.around.between(pair.one.pci, pair.other.pci):
            if bridge.redirects:
                found.setdefault(bridge, []).append(pair)
    return found


def hides_acs(paths: HostPaths, pairs: Iterable[Pair]) -> bool:
    """Is there a bridge between these GPUs whose ACS could not be read?"""
    return any(bridge.acs is None for pair in pairs for bridge in paths.around.between(pair.one.pci, pair.other.pci))


def addresses(bridges: Iterable[Bridge]) -> str:
    """Such as "0000:17:01.0, 0000:17:03.0"."""
    return names_text([bridge.address for bridge in bridges], _BRIDGES_SHOWN)


def acs(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """Bridges that redirect, where nothing needs them to: a virtual machine does."""
    found = redirecting(paths, paths.unlinked)
    if not found or paths.around.virtual:
        return
    pairs = [pair for pair in paths.unlinked if any(pair in own for own in found.values())]
    detours = [pair for pair in pairs if paths.around.share_a_bridge(pair.one.pci, pair.other.pci)]
    # Between root ports traffic goes through the processor anyway, and with an IOMMU the kernel sets ACS on all of
    # them: most such hosts copy well.
    harm = (
        f"The traffic of {pairs_text(detours)} could stay in their PCIe switch, but goes through the processor, which "
        "is slow."
        if detours
        else f"The traffic of {pairs_text(pairs)} goes through the processor in any case."
    )
    noun = "bridge" if len(found) == 1 else "bridges"
    first = next(iter(found)).address
    yield seen.finding(
        "acs",
        "ACS redirects traffic between GPUs",
        f"{paths.host.name}: ACS is on at PCI {noun} {addresses(found)}, between GPUs without NVLinks; off is expected "
        f"on a host that is not a virtual machine (NCCL's troubleshooting guide). {harm} On some mainboards NCCL hangs "
        "or sums wrong values.",
        severity=Severity.WARNING if detours else Severity.NOTE,
        nodes=(paths.host.name,),
        evidence={
            "bridges": [f"{bridge.address}: ACSCtl {bridge.acs:#06x}" for bridge in list(found)[:_LISTED]],
            "gpus": [label(gpu) for gpu in gpus_of(pairs)],
            "pairs": len(pairs),
            "pairs_at_a_switch": len(detours),
        },
        fix="Switch ACS off in the BIOS, or until the next boot as root with "
        f"`setpci -s {first} ECAP_ACS+6.w=0000`{' (and so on)' if len(found) > 1 else ''}; boot with iommu=pt; set "
        "NCCL_P2P_DISABLE=1 if copies fail.",
    )


def iommu(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """A note: the IOMMU translates addresses for GPUs without NVLinks."""
    pairs = paths.unlinked
    if own := [gpu for gpu in gpus_of(pairs) if paths.around.translates(gpu.pci)]:
        domains = dict.fromkeys(paths.around.slot(gpu.pci).domain or "?" for gpu in own)
        hidden = " Only root can see whether ACS redirects traffic (`lspci -vvv | grep ACSCtl`)."
        yield seen.finding(
            "iommu",
            "the IOMMU translates addresses for GPUs",
            f"{paths.host.name}: the IOMMU translates addresses for {len(own)} GPUs without NVLinks between them "
            f"(domain {', '.join(domains)}); identity is the safe setting for P2P over PCIe."
            + (hidden if hides_acs(paths, pairs) else ""),
            nodes=(paths.host.name,),
            evidence={
                "gpus": [label(gpu) for gpu in own],
                "kernel_parameters": list(paths.around.parameters),
                "iommu_groups": paths.around.iommu_groups,
            },
            fix="Boot with iommu=pt, or switch the IOMMU off in the BIOS, if copies between GPUs are slow or fail.",
        )
