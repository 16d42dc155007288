"""Paths between the GPUs of a host.

NCCL sends from GPU to GPU over NVLink or, peer to peer (P2P), over PCIe, and where neither is possible through shared
memory of the host, at a fraction of the speed. This check asks NVML how each pair is connected and whether P2P is
allowed, and looks for what breaks P2P although NVML allows it: ACS (Access Control Services) on a PCIe bridge, which
sends all traffic between peers up to the processor, and an IOMMU that translates it. NCCL then hangs at 100 % GPU
utilisation, is slow, or sums wrong values. P2P002 tests whether copies work.

The names are those of `nvidia-smi topo -m`: NV18 for 18 NVLinks, PIX for one PCIe switch, PXB for several, PHB for the
processor's host bridge, NODE for several of one NUMA node, SYS for another socket. Different paths between GPUs of one
host are normal.

Findings and their causes:

Only root can read ACS: for other users `lspci -vvv` does not show it, and this check reports that.

Fix: switch ACS and IOMMU (VT-d, AMD-Vi) off in the BIOS, or use `setpci` as the finding shows, or boot with
iommu=pt; if copies fail, NCCL_P2P_DISABLE=1 gives right values at a lower speed.

Confirm by hand: `nvidia-smi topo -m; nvidia-smi topo -p2p r`; as root `lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'`; `cat
/proc/cmdline; ls /sys/kernel/iommu_groups`.

Sources: NCCL user guide, troubleshooting (docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html), PCI
access control services and GPU-to-GPU communication; NVML API reference (docs.nvidia.com/deploy/nvml-api),
nvmlDeviceGetP2PStatus; PCI Express base specification, ACS; NCCL issue 257.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import smi_id
from ddpdiag.checks.hosts import nvml_fix
from ddpdiag.checks.matrix import explain
from ddpdiag.checks.p2p.host_paths import (
    Data,
    HostPaths,
    Pair,
    addresses,
    gpus_of,
    hides_acs,
    host_paths,
    label,
    odd_pairs,
    pairs_text,
    redirecting,
    status_of,
    words,
)
from ddpdiag.model import Finding, Matrix, Severity
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.iommu import surroundings
from ddpdiag.probes.gpu.paths import P2P, GpuPath, gpu_paths
from ddpdiag.probes.gpu.visibility import nvidia_functions
from ddpdiag.probes.host.kernel import proc_root, sys_root

FINDINGS = {
    "disabled": FindingSpec.warning(
        "P2P is switched off in the driver (registry key), is allowed in one direction only, or is not allowed for a "
        "pair although it is for most pairs of these models with the same connection: a bridge that is not seated, "
        "another slot or BIOS setting."
    ),
    "no-p2p": FindingSpec.note(
        "the cards or the mainboard do not support P2P, as most consumer cards: expect the bandwidth of shared memory."
    ),
    "acs": FindingSpec(
        "ACS redirects traffic between GPUs that have no NVLink, on a host that is not a virtual machine (which needs "
        "ACS). A warning where a PCIe switch could have carried the traffic, else a note."
    ),
    "iommu": FindingSpec.note(
        "the IOMMU translates addresses for GPUs without NVLinks: the kernel then also sets ACS where it can."
    ),
    "unreadable": FindingSpec.not_seen("NVML returned an error."),
}

# As `nvidia-smi topo -p2p` shows them; it has no letters for the registry key.
_CELLS: Mapping[P2P | None, str] = {
    P2P.OK: "OK",
    P2P.CHIPSET_NOT_SUPPORTED: "CNS",
    P2P.GPU_NOT_SUPPORTED: "GNS",
    P2P.TOPOLOGY_NOT_SUPPORTED: "TNS",
    P2P.DISABLED_BY_REGKEY: "DR",
    P2P.NOT_SUPPORTED: "NS",
}


# What holds of a pair however it is connected, as `P2P` numbers: cards or board that are not made for it.
_UNSUPPORTED = (P2P.CHIPSET_NOT_SUPPORTED, P2P.GPU_NOT_SUPPORTED, P2P.TOPOLOGY_NOT_SUPPORTED, P2P.NOT_SUPPORTED)


def measure(ctx: Context) -> Data:
    # The surroundings first: NVML may hang, and the step then shows it.
    proc, sys = proc_root(os.environ), sys_root(os.environ)
    around = surroundings([function.address for function in nvidia_functions(sys) or ()], proc, sys)
    return Data(paths=gpu_paths(ctx.step), around=around)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """A pair takes two GPUs on one host; ranks that are bound to one GPU each show one only."""
    arrivals = seen.world.arrivals
    pairs = any(sum(arrivals[rank].gpus for rank in ranks) > 1 for ranks in seen.world.hosts.values())
    return devices.skip(seen) or inapplicable(None if pairs else "no host has two GPUs")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for paths in host_paths(seen):
        for look in (_unreadable, disabled, refused, acs, iommu):
            yield from look(seen, paths)


def _unreadable(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    if paths.errors and not paths.gpus:
        yield seen.finding(
            "unreadable",
            "the links between GPUs cannot be read",
            f"{paths.host.name}: NVML reports {paths.errors[0]!r}, so it is not known how its {paths.host.gpus} GPUs "
            "are connected.",
            ranks=paths.host.ranks,
            evidence={"error": paths.errors[0]},
            fix=nvml_fix(paths.host.name),
        )


def disabled(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """Pairs that could do P2P and may not: switched off in the driver, in one direction, or unlike the others."""
    odd = odd_pairs(seen)
    pairs = [pair for pair in paths.pairs if pair.is_asymmetric or pair.is_switched_off or pair in odd]
    bad = {link for pair in pairs for link, status in pair.by_direction.items() if status is not P2P.OK}
    good = {link for pair in paths.pairs for link, status in pair.by_direction.items() if status is P2P.OK}
    pattern = explain(bad, good)
    if pattern is None:
        return
    gpus = [gpu for gpu in paths.gpus if gpu.index in pattern.hosts]
    whose = f"; they include {', '.join(map(label, gpus))}" if gpus else ""
    if any(pair.is_switched_off for pair in pairs):
        expected = "it is switched off in the driver"
        fix = (
            f"As root remove the key from NVreg_RegistryDwords in /etc/modprobe.d/ on {paths.host.name} (`grep "
            "Registry /proc/driver/nvidia/params` shows it), then reload the driver or reboot."
        )
    elif any(pair.is_asymmetric for pair in pairs):
        ids = ",".join(smi_id(gpu.uuid, gpu.pci) for gpu in gpus_of(pairs))
        expected = "it is allowed in the other direction"
        fix = (
            f"As root reset these GPUs (`nvidia-smi --gpu-reset -i {ids}`), or reboot {paths.host.name}. Until then "
            "set NCCL_P2P_DISABLE=1 if the job hangs or P2P002 finds wrong copies."
        )
    else:
        expected = "it is allowed for more than half of the pairs of these models with the same connection"
        fix = (
            f"Run `nvidia-smi topo -m` and `nvidia-smi topo -p2p r` on {paths.host.name}; compare slots, bridges "
            "and BIOS settings of these GPUs with those of the other pairs."
        )
    yield seen.finding(
        "disabled",
        "P2P is not allowed between GPUs",
        f"{paths.host.name}: P2P is not allowed for {len(pairs)} of {len(paths.pairs)} pairs of GPUs "
        f"({pairs_text(pairs)}: {_reasons(pairs)}){whose}; {expected}. NCCL uses shared memory for these pairs.",
        hosts=(paths.host.name,),
        gpus=[gpu.uuid for gpu in gpus if gpu.uuid],
        links=[f"{paths.host.name}: {pair.name}" for pair in pairs],
        evidence={
            "pairs": [f"{pair.name}: {_reasons([pair])}" for pair in pairs],
            "gpus": [label(member) for member in gpus_of(pairs)],
        },
        fix=fix,
    )


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
            f"cannot do P2P ({pairs_text(pairs)}: {_reasons(pairs)}). NCCL uses the host's shared memory for these "
            "pairs. Expect the bandwidth of shared memory there.",
            hosts=(paths.host.name,),
            evidence={"pairs": len(pairs), "gpus": [label(gpu) for gpu in gpus_of(pairs)]},
            fix="Nothing to do for consumer cards: most do not support P2P. For data-centre GPUs show `nvidia-smi "
            "topo -p2p r` to the administrator: the mainboard, the BIOS or a virtual machine may prevent it.",
        )


def _reasons(pairs: Sequence[Pair]) -> str:
    """Why these may not, each reason once: "chipset not supported"."""
    found = dict.fromkeys(status for pair in pairs for status in pair.statuses if status is not P2P.OK)
    return ", ".join(map(words, found))


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
        f"So traffic of {pairs_text(detours)} goes through the CPU, which is slow, instead of their PCIe switch."
        if detours
        else f"Traffic of {pairs_text(pairs)} goes through the CPU in any case."
    )
    noun = "bridge" if len(found) == 1 else "bridges"
    first = next(iter(found)).address
    yield seen.finding(
        "acs",
        "ACS redirects traffic between GPUs",
        f"{paths.host.name}: ACS (PCIe access control) is on at PCI {noun} {addresses(found)}, between GPUs without "
        f"NVLinks. {harm} On some mainboards NCCL hangs or sums wrong values. NCCL's troubleshooting guide expects ACS "
        "to be off on a host that is not a virtual machine.",
        severity=Severity.WARNING if detours else Severity.NOTE,
        hosts=(paths.host.name,),
        evidence={
            "bridges": [f"{bridge.address}: ACSCtl {bridge.acs:#06x}" for bridge in found],
            "gpus": [label(gpu) for gpu in gpus_of(pairs)],
            "pairs": len(pairs),
            "pairs_at_a_switch": len(detours),
        },
        fix=f"Turn ACS off in the BIOS. Or, as root until the next boot, run `setpci -s {quote(first)} "
        "ECAP_ACS+6.w=0000`"
        f"{' for each of these bridges' if len(found) > 1 else ''}. Until then set NCCL_P2P_DISABLE=1 if the job "
        "hangs.",
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
            f"(domain type {', '.join(domains)}). Passthrough (domain type identity) is the safe setting for P2P over "
            "PCIe." + (hidden if hides_acs(paths, pairs) else ""),
            hosts=(paths.host.name,),
            evidence={
                "gpus": [label(gpu) for gpu in own],
                "kernel_parameters": list(paths.around.parameters),
                "iommu_groups": paths.around.iommu_groups,
            },
            fix="Nothing to do if P2P002 finds no slow or wrong copies. Otherwise boot with iommu=pt on the kernel's "
            "command line, or turn the IOMMU off in the BIOS.",
        )


def matrices(seen: Seen[Data]) -> Iterator[Matrix]:
    """The connections of each host's GPUs; and NVML's states of P2P, where these are not OK everywhere."""
    for paths in host_paths(seen):
        if any(pair.known for pair in paths.pairs):
            yield _matrix(paths, "topology", "paths between GPUs", _connection)
            if any(pair.works is False for pair in paths.pairs):
                found = {status for pair in paths.pairs for status in pair.statuses} - {P2P.OK}
                legend = ", ".join(f"{_CELLS[status]}: {words(status)}" for status in sorted(found))
                yield _matrix(
                    paths, "status", f"P2P allowed by NVML ({legend})", lambda path, _: _CELLS.get(status_of(path))
                )


def _connection(path: GpuPath, pair: Pair) -> str | None:
    return f"NV{path.nvlinks}" if path.nvlinks else None if pair.level is None else pair.level.name


def _matrix(paths: HostPaths, what: str, title: str, word: Callable[[GpuPath, Pair], str | None]) -> Matrix:
    known: dict[tuple[int, int], str | None] = {}
    for pair in paths.pairs:
        for source, target, path in ((pair.one, pair.other, pair.there), (pair.other, pair.one, pair.back)):
            known[source.index, target.index] = None if path is None else word(path, pair)
    order = [gpu.index for gpu in paths.gpus]
    cells = tuple(tuple("X" if row == column else known.get((row, column)) for column in order) for row in order)
    names = tuple(f"GPU {index}" for index in order)
    gpus = {name: gpu.uuid for name, gpu in zip(names, paths.gpus, strict=True) if gpu.uuid}
    return Matrix(name=f"p2p.{what}.{paths.host.name}", title=title, rows=names, columns=names, cells=cells, gpus=gpus)


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(matrices=tuple(matrices(seen)))


plan = memory_errors.plan
# As GPU003: without persistence mode the driver starts every GPU anew, for 1 to 3 s each.
CHECK: Check[Data] = Check(__name__, "P2P001", "topology", Stage.P2P, Scope.HOST, deadline=45.0)
