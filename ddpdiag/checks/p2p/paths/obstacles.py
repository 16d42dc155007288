"""P2P001's second half: ACS and IOMMU between GPUs that have no NVLink."""

from collections.abc import Iterable, Iterator

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import names_text
from ddpdiag.checks.p2p.paths.data import Data, Pair, PathView, gpus_of, label, pairs_text
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.gpu.iommu import Bridge

_BRIDGES_SHOWN = 4
_LISTED = 64


def redirecting(view: PathView, pairs: Iterable[Pair]) -> dict[Bridge, list[Pair]]:
    """Bridges between these GPUs on which ACS redirects, with the pairs that each concerns."""
    found: dict[Bridge, list[Pair]] = {}
    for pair in pairs:
        for bridge in view.around.between(pair.one.pci, pair.other.pci):
            if bridge.redirects:
                found.setdefault(bridge, []).append(pair)
    return found


def hides_acs(view: PathView, pairs: Iterable[Pair]) -> bool:
    """Is there a bridge between these GPUs whose ACS could not be read?"""
    return any(bridge.acs is None for pair in pairs for bridge in view.around.between(pair.one.pci, pair.other.pci))


def translated(view: PathView, pairs: Iterable[Pair]) -> bool:
    """Does the IOMMU translate for any of these GPUs?"""
    return any(view.around.translates(gpu.pci) for gpu in gpus_of(pairs))


def addresses(bridges: Iterable[Bridge]) -> str:
    """Such as "0000:17:01.0, 0000:17:03.0"."""
    return names_text([bridge.address for bridge in bridges], _BRIDGES_SHOWN)


def acs(seen: Seen[Data], view: PathView) -> Iterator[Finding]:
    """Bridges that redirect, where nothing needs them to: a virtual machine does."""
    found = redirecting(view, view.unlinked)
    if not found or view.around.virtual:
        return
    pairs = [pair for pair in view.unlinked if any(pair in own for own in found.values())]
    detours = [pair for pair in pairs if view.around.share_a_bridge(pair.one.pci, pair.other.pci)]
    # Between root ports traffic goes by the processor anyway, and with an IOMMU the kernel sets ACS on all of them:
    # most such hosts copy well.
    harm = (
        f"{pairs_text(detours)} could exchange data at their PCIe switch and go by the processor instead: slow"
        if detours
        else f"{pairs_text(pairs)} go by the processor in any case"
    )
    noun = "bridge" if len(found) == 1 else "bridges"
    first = next(iter(found)).address
    yield seen.finding(
        "acs",
        "ACS redirects traffic between GPUs",
        f"{view.host.name}: ACS is on at PCI {noun} {addresses(found)}, between GPUs without NVLinks: {harm}, and on "
        "some boards NCCL hangs or sums wrong values; off is expected on a host that is no virtual machine (NCCL's "
        "troubleshooting guide).",
        severity=Severity.WARNING if detours else Severity.NOTE,
        nodes=(view.host.name,),
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


def iommu(seen: Seen[Data], view: PathView) -> Iterator[Finding]:
    """Good to know: the IOMMU translates for GPUs without NVLinks."""
    pairs = view.unlinked
    own = [gpu for gpu in gpus_of(pairs) if view.around.translates(gpu.pci)]
    if own:
        domains = dict.fromkeys(view.around.slot(gpu.pci).domain or "?" for gpu in own)
        hidden = " Whether ACS redirects is known to root only (`lspci -vvv | grep ACSCtl`)."
        yield seen.finding(
            "iommu",
            "the IOMMU translates what GPUs send",
            f"{view.host.name}: the IOMMU translates for {len(own)} GPUs without NVLinks between them (domain "
            f"{', '.join(domains)}); identity is the safe choice for P2P over PCIe."
            + (hidden if hides_acs(view, pairs) else ""),
            nodes=(view.host.name,),
            evidence={
                "gpus": [label(gpu) for gpu in own],
                "kernel_parameters": list(view.around.parameters),
                "iommu_groups": view.around.iommu_groups,
            },
            fix="Boot with iommu=pt, or switch the IOMMU off in the BIOS, if copies between GPUs are slow or fail.",
        )
