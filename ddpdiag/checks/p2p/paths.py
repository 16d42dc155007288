"""Paths between the GPUs of a host.

NCCL sends from GPU to GPU over NVLink or, peer to peer (P2P), over PCIe. If neither is possible, NCCL uses shared
memory of the host, at a fraction of the speed. This check asks NVML how each pair is connected and whether P2P is
allowed. It also looks for what breaks P2P although NVML allows it: ACS (Access Control Services) on a PCIe bridge,
which sends all traffic between peers up to the processor, and an IOMMU that translates the addresses of this traffic.
NCCL then hangs at 100 % GPU utilisation, is slow, or sums wrong values. P2P002 tests whether copies work.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from shlex import quote
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import cards_of, smi_id
from ddpdiag.checks.hosts import Host, data_by_host, names_text, nvml_fix
from ddpdiag.checks.launch import versions
from ddpdiag.checks.matrix import Link, find_pattern
from ddpdiag.model import Finding, Matrix, Severity
from ddpdiag.model.trial import Context
from ddpdiag.nccl_rings import p2p_level
from ddpdiag.probes.gpu.iommu import Bridge, PcieTopology, read_pcie_topology
from ddpdiag.probes.gpu.nvml import Gpu
from ddpdiag.probes.gpu.paths import P2P, GpuPath, Level, Paths, gpu_paths
from ddpdiag.probes.gpu.visibility import nvidia_functions
from ddpdiag.probes.host.kernel import proc_root, sys_root

FINDINGS = {
    "disabled": FindingSpec.warning(
        "P2P is switched off in the driver (registry key), is allowed in one direction only, or is not allowed for a "
        "pair although it is for most pairs of these models with the same connection: a bridge that is not seated, "
        "another slot or BIOS setting."
    ),
    "acs": FindingSpec(
        "ACS redirects traffic between GPUs that have no NVLink, on a host that is not a virtual machine (which needs "
        "ACS), or the IOMMU translates their addresses: the kernel then also sets ACS where it can. A warning where a "
        "PCIe switch could have carried the traffic, else a note."
    ),
    "unreadable": FindingSpec.unchecked("NVML returned an error."),
}

# The letters of `nvidia-smi topo -p2p`, and DR for the registry key, for which it has none.
_STATUS_LETTERS: Mapping[P2P, str] = {
    P2P.CHIPSET_NOT_SUPPORTED: "CNS",
    P2P.GPU_NOT_SUPPORTED: "GNS",
    P2P.TOPOLOGY_NOT_SUPPORTED: "TNS",
    P2P.DISABLED_BY_REGKEY: "DR",
    P2P.NOT_SUPPORTED: "NS",
}


class Data(Struct, frozen=True, kw_only=True):
    """The answer of one rank: the GPUs that NVML shows with their paths, and the PCI devices above the GPUs."""

    paths: Paths
    surroundings: PcieTopology = PcieTopology()


class Pair(NamedTuple):
    """Two GPUs of a host, with the paths from `one` to `other` and back (None if no rank sees both GPUs)."""

    one: Gpu
    other: Gpu
    forward: GpuPath | None
    reverse: GpuPath | None

    @property
    def known_paths(self) -> tuple[GpuPath, ...]:
        return tuple(path for path in (self.forward, self.reverse) if path is not None)

    @property
    def level(self) -> Level | None:
        """The level at which the PCIe paths of the two GPUs meet, or None if it is not known."""
        levels = {path.level for path in self.known_paths}
        return next((level for level in Level if level in levels), None)

    @property
    def link_statuses(self) -> dict[Link, P2P]:
        """NVML's P2P status of each direction, by the indices of the GPUs (from, to), if NVML reports it."""
        paths = ((self.one, self.other, self.forward), (self.other, self.one, self.reverse))
        statuses = (((one.index, other.index), status_of(path)) for one, other, path in paths if path is not None)
        return {link: status for link, status in statuses if status is not None}

    @property
    def statuses(self) -> tuple[P2P, ...]:
        """The values of `link_statuses`: none, one or two."""
        return tuple(self.link_statuses.values())

    @property
    def has_nvlinks(self) -> bool:
        """Whether NVML reports NVLinks between the two GPUs."""
        return any(path.nvlinks for path in self.known_paths)

    @property
    def is_pcie_only(self) -> bool:
        """Whether NVML reports that there are no NVLinks between the two GPUs."""
        return bool(self.known_paths) and all(path.nvlinks == 0 for path in self.known_paths)

    @property
    def is_p2p_allowed(self) -> bool | None:
        """Whether NVML allows P2P in both directions; None if it reports no status."""
        return all(status is P2P.OK for status in self.statuses) if self.statuses else None

    @property
    def is_asymmetric(self) -> bool:
        """Whether NVML allows P2P in one direction and not in the other."""
        return len(self.statuses) == 2 and (P2P.OK in self.statuses) and not self.is_p2p_allowed

    @property
    def name(self) -> str:
        """The pair, such as "GPU 1 <-> GPU 2", or the only direction that is not allowed, such as "GPU 2 -> GPU 1"."""
        if self.is_asymmetric:
            denied_link = next(link for link, status in self.link_statuses.items() if status is not P2P.OK)
            return " -> ".join(f"GPU {index}" for index in denied_link)
        return f"GPU {self.one.index} <-> GPU {self.other.index}"

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that comparable pairs share: the models, the level of their PCIe paths, and whether NVLinks exist."""
        return (tuple(sorted((self.one.name or "", self.other.name or ""))), self.level, self.has_nvlinks)


class HostPaths(Struct, frozen=True, kw_only=True):
    """The job's GPUs on one host, all pairs of them, and the PCI devices above them.

    `errors` are errors of NVML itself, not of single GPUs. `nccl_version` is that of NCCL on the host's ranks (LCH003).
    """

    host: Host
    gpus: tuple[Gpu, ...]
    pairs: tuple[Pair, ...]
    surroundings: PcieTopology
    errors: tuple[str, ...] = ()
    nccl_version: str | None = None

    @property
    def pcie_pairs(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.is_pcie_only)

    @property
    def pairs_through_memory(self) -> tuple[Pair, ...]:
        """Pairs without NVLinks that are too far apart for NCCL's P2P, so that NCCL uses the host's memory."""
        limit = p2p_level(self.surroundings.processor, len(self.host.ranks), self.nccl_version)
        return tuple(
            pair for pair in self.pcie_pairs if pair.level is not None and limit is not None and pair.level > limit
        )


def status_of(path: GpuPath) -> P2P | None:
    """The path's P2P status: that of the first problem (reads, writes, disabled NVLinks), else OK; None: unknown."""
    reported = [P2P(status) for status in (path.read, path.write) if status is not None]
    if path.nvlinks and path.nvlink == P2P.DISABLED_BY_REGKEY:
        reported.append(P2P.DISABLED_BY_REGKEY)
    statuses = [status for status in reported if status is not P2P.UNKNOWN]
    return next((status for status in statuses if status is not P2P.OK), P2P.OK) if statuses else None


@lru_cache(maxsize=1)
def host_paths(seen: Seen[Data]) -> tuple[HostPaths, ...]:
    """The paths of each host of which a rank answered, sorted by host.

    Two kinds of GPUs are not included: GPUs that no rank may use, which belong to other jobs, and GPUs that are divided
    into slices (MIG), between which P2P does not exist.
    """
    job_gpus: dict[tuple[int, ...], set[str]] = {}  # UUIDs, by the ranks of the host
    for card in cards_of(seen.of(memory_errors.CHECK)):
        uuids = job_gpus.setdefault(card.host.ranks, set())
        if card.health.uuid is not None and not card.health.mig:
            uuids.add(card.health.uuid)
    nccl = {rank: data.nccl for rank, data in seen.of(versions.CHECK).by_rank.items()}
    return tuple(
        _host_paths(
            host, tuple(rows.values()), job_gpus.get(host.ranks), next(filter(None, map(nccl.get, host.ranks)), None)
        )
        for host, rows in data_by_host(seen)
    )


def _host_paths(host: Host, answers: Sequence[Data], job_gpus: set[str] | None, nccl_version: str | None) -> HostPaths:
    """The paths of one host. `job_gpus` are UUIDs of the GPUs to include (None: all, if GPU003 has no data)."""
    rank_paths = [row.paths for row in answers]
    all_gpus = _unique_in_bus_order(gpu for paths in rank_paths for gpu in paths.gpus if gpu.error is None)
    gpus = tuple(gpu for gpu in all_gpus if job_gpus is None or gpu.uuid is None or gpu.uuid in job_gpus)
    paths_by_gpus: dict[tuple[str, str], GpuPath] = {}
    for paths in rank_paths:
        keys = {gpu.index: _key(gpu) for gpu in paths.gpus}
        paths_by_gpus |= {
            (keys[path.source], keys[path.target]): path
            for path in paths.paths
            if path.source in keys and path.target in keys
        }
    return HostPaths(
        host=host,
        gpus=gpus,
        pairs=tuple(
            Pair(one, other, paths_by_gpus.get((_key(one), _key(other))), paths_by_gpus.get((_key(other), _key(one))))
            for one, other in combinations(gpus, 2)
        ),
        surroundings=answers[0].surroundings,
        errors=tuple(paths.error for paths in rank_paths if paths.error),
        nccl_version=nccl_version,
    )


def _unique_in_bus_order(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """Each GPU once, sorted by PCI address. Positions replace indices if two GPUs of different ranks have one index."""
    ordered = sorted({_key(gpu): gpu for gpu in gpus}.values(), key=lambda gpu: (gpu.pci or "", gpu.index))
    if len({gpu.index for gpu in ordered}) == len(ordered):
        return tuple(ordered)
    return tuple(structs.replace(gpu, index=number) for number, gpu in enumerate(ordered))


def _key(gpu: Gpu) -> str:
    return gpu.uuid or gpu.pci or f"index {gpu.index}"


@lru_cache(maxsize=1)
def odd_pairs(seen: Seen[Data]) -> frozenset[Pair]:
    """Pairs without P2P, although NVML allows P2P for more than half of the pairs of the same `kind` on all hosts.

    Pairs whose directions differ (`is_asymmetric`) are not counted.
    """
    kinds = defaultdict(list)
    for pair in (pair for paths in host_paths(seen) for pair in paths.pairs):
        if pair.is_p2p_allowed is not None and not pair.is_asymmetric:
            kinds[pair.kind].append(pair)
    return frozenset(
        pair
        for pairs in kinds.values()
        if 2 * sum(bool(pair.is_p2p_allowed) for pair in pairs) > len(pairs)
        for pair in pairs
        if not pair.is_p2p_allowed
    )


def _label(gpu: Gpu) -> str:
    """The GPU in words, such as "GPU 5 (GPU-3f1c..., PCI 0000:65:00.0)"."""
    details = ", ".join(filter(None, [gpu.uuid, f"PCI {gpu.pci}" if gpu.pci else None]))
    return f"GPU {gpu.index}{f' ({details})' if details else ''}"


def _gpus_of(pairs: Iterable[Pair]) -> list[Gpu]:
    """The GPUs of these pairs, each once, sorted by index."""
    gpus = {gpu.index: gpu for pair in pairs for gpu in (pair.one, pair.other)}
    return [gpus[index] for index in sorted(gpus)]


def _status_text(status: P2P) -> str:
    return status.name.replace("_", " ").lower().replace("gpu", "GPU").replace("regkey", "a registry key")


def _reasons_text(pairs: Sequence[Pair]) -> str:
    """The reasons why NVML does not allow P2P for these pairs, each once, such as "chipset not supported"."""
    statuses = dict.fromkeys(status for pair in pairs for status in pair.statuses if status is not P2P.OK)
    return ", ".join(map(_status_text, statuses))


def measure(ctx: Context) -> Data:
    """Read the PCI devices above the GPUs, then query NVML. NVML comes last, because it may hang."""
    proc, sys = proc_root(os.environ), sys_root(os.environ)
    bus = read_pcie_topology([function.address for function in nvidia_functions(sys) or ()], proc, sys)
    return Data(paths=gpu_paths(ctx.step), surroundings=bus)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip if GPU002 is skipped, or if no host has two GPUs. Counts all ranks' GPUs, as a rank may see only its own."""
    arrivals = seen.world.arrivals
    has_pairs = any(sum(arrivals[rank].gpus for rank in ranks) > 1 for ranks in seen.world.hosts.values())
    return devices.skip(seen) or inapplicable(None if has_pairs else "no host has two GPUs")


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for paths in host_paths(seen):
        if paths.errors and not paths.gpus:
            yield seen.finding(
                "unreadable",
                "the links between GPUs cannot be read",
                f"{paths.host.name}: NVML reports {paths.errors[0]!r}, so it is not known how its "
                f"{paths.host.gpu_count} GPUs are connected.",
                ranks=paths.host.ranks,
                evidence={"error": paths.errors[0]},
                fix=nvml_fix(paths.host.name),
            )
        yield from disabled_findings(seen, paths)
        yield from acs_findings(seen, paths)


def disabled_findings(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """The finding on pairs without P2P: disabled in the driver or in one direction, or unlike most similar pairs."""
    name, odd = paths.host.name, odd_pairs(seen)
    switched_off = [pair for pair in paths.pairs if P2P.DISABLED_BY_REGKEY in pair.statuses]
    pairs = [pair for pair in paths.pairs if pair in switched_off or pair.is_asymmetric or pair in odd]
    denied_links = {link for pair in pairs for link, status in pair.link_statuses.items() if status is not P2P.OK}
    allowed_links = {link for pair in paths.pairs for link, status in pair.link_statuses.items() if status is P2P.OK}
    pattern = find_pattern(denied_links, allowed_links)
    if pattern is None:
        return
    gpus = [gpu for gpu in paths.gpus if gpu.index in pattern.hosts]
    gpus_text = f"; they include {', '.join(map(_label, gpus))}" if gpus else ""
    if switched_off:
        expected = "it is switched off in the driver"
        fix = (
            f"As root remove the key from NVreg_RegistryDwords in /etc/modprobe.d/ on {name} (`grep Registry "
            "/proc/driver/nvidia/params` shows it), then reload the driver or reboot."
        )
    else:
        expected = "it is allowed in the other direction, or for most pairs of these models with the same connection"
        fix = (
            f"Run `nvidia-smi topo -m` and `nvidia-smi topo -p2p r` on {name}; compare slots, bridges and BIOS "
            "settings of these GPUs with those of the other pairs. As root reset these GPUs (`nvidia-smi --gpu-reset "
            f"-i {','.join(smi_id(gpu.uuid, gpu.pci) for gpu in _gpus_of(pairs))}`), or reboot {name}. Until then set "
            "NCCL_P2P_DISABLE=1 if the job hangs or P2P002 finds wrong copies."
        )
    yield seen.finding(
        "disabled",
        "P2P is not allowed between GPUs",
        f"{name}: P2P is not allowed for {len(pairs)} of {len(paths.pairs)} pairs of GPUs "
        f"({names_text([pair.name for pair in pairs])}: {_reasons_text(pairs)}){gpus_text}; {expected}. NCCL uses "
        "shared memory for these pairs.",
        hosts=(name,),
        gpus=[gpu.uuid for gpu in gpus if gpu.uuid],
        links=[f"{name}: {pair.name}" for pair in pairs],
        evidence={
            "pairs": [f"{pair.name}: {_reasons_text([pair])}" for pair in pairs],
            "gpus": [*map(_label, _gpus_of(pairs))],
        },
        fix=fix,
    )


def acs_findings(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    """The finding on bridges (outside virtual machines) that redirect GPU traffic, or on a translating IOMMU."""
    bus = paths.surroundings
    bridges_by_pair = [(pair, bus.bridges_between(pair.one.pci, pair.other.pci)) for pair in paths.pcie_pairs]
    bridges = dict.fromkeys(bridge for _, between in bridges_by_pair for bridge in between if bridge.redirects)
    if bus.virtual:
        bridges = {}
    pairs = [pair for pair, between in bridges_by_pair if bridges.keys() & {*between}]
    translated_gpus = [gpu for gpu in _gpus_of(paths.pcie_pairs) if bus.translates(gpu.pci)]
    if not (pairs or translated_gpus):
        return
    # Only pairs at one PCIe switch lose speed. Between root ports traffic goes through the processor in any case, and
    # with an IOMMU the kernel sets ACS on all root ports. Most such hosts copy well.
    switch_pairs = [pair for pair in pairs if bus.share_a_bridge(pair.one.pci, pair.other.pci)]
    sentences = [_acs_sentence(list(bridges), pairs, switch_pairs)] if pairs else []
    if translated_gpus:
        sentences.append(_iommu_sentence(bus, translated_gpus))
    if not bridges and any(bridge.acs is None for _, between in bridges_by_pair for bridge in between):
        sentences.append("Only root can see whether ACS redirects traffic (`lspci -vvv | grep ACSCtl`).")
    command = next((f"`setpci -s {quote(bridge.address)} ECAP_ACS+6.w=0000`" for bridge in bridges), "")
    setpci = f", or as root run {command} for each of these bridges (until the next boot)" if command else ""
    fix = f"urn ACS and the IOMMU off in the BIOS, or boot with iommu=pt{setpci}. Until then set NCCL_P2P_DISABLE=1 "
    fix += "if the job hangs."
    yield seen.finding(
        "acs",
        "ACS redirects traffic between GPUs" if pairs else "the IOMMU translates addresses for GPUs",
        f"{paths.host.name}: {' '.join(sentences)}",
        severity=Severity.WARNING if switch_pairs else Severity.NOTE,
        hosts=(paths.host.name,),
        evidence={
            "bridges": [f"{bridge.address}: ACSCtl {bridge.acs:#06x}" for bridge in bridges],
            "gpus": [*map(_label, _gpus_of(pairs) or translated_gpus)],
            "pairs": len(pairs),
            "pairs_at_a_switch": len(switch_pairs),
        },
        fix=f"{'T' if switch_pairs else 'Nothing to do if P2P002 finds no slow or wrong copies. Otherwise t'}{fix}",
    )


def _acs_sentence(bridges: Sequence[Bridge], pairs: Sequence[Pair], switch_pairs: Sequence[Pair]) -> str:
    instead = ", which is slow, instead of their PCIe switch" if switch_pairs else " in any case"
    return (
        f"ACS (PCIe access control) is on at PCI {'bridge' if len(bridges) == 1 else 'bridges'} "
        f"{names_text([bridge.address for bridge in bridges])}, between GPUs without NVLinks. Traffic of "
        f"{names_text([pair.name for pair in switch_pairs or pairs])} goes through the CPU{instead}. On some "
        "mainboards NCCL hangs or sums wrong values. NCCL's troubleshooting guide expects ACS to be off on a host that "
        "is not a virtual machine."
    )


def _iommu_sentence(bus: PcieTopology, translated_gpus: Sequence[Gpu]) -> str:
    domains = ", ".join(dict.fromkeys(bus.slot(gpu.pci).domain or "?" for gpu in translated_gpus))
    return (
        f"The IOMMU translates addresses for {len(translated_gpus)} GPUs without NVLinks between them (domain type "
        f"{domains}). Passthrough (domain type identity) is the safe setting for P2P over PCIe."
    )


def matrices(seen: Seen[Data]) -> Iterator[Matrix]:
    """One table per host with the connection of each pair, and its P2P status unless OK: "PIX", "NV18", "SYS DR"."""
    for paths in host_paths(seen):
        if not any(pair.known_paths for pair in paths.pairs):
            continue
        cells: dict[Link, str] = {}
        for pair in paths.pairs:
            for source, target, path in ((pair.one, pair.other, pair.forward), (pair.other, pair.one, pair.reverse)):
                if path is not None and (path.nvlinks or pair.level is not None):
                    level = f"NV{path.nvlinks}" if path.nvlinks else pair.level.name if pair.level else ""
                    cell = _STATUS_LETTERS.get(status_of(path) or P2P.OK, "")
                    cells[source.index, target.index] = f"{level} {cell}".strip()
        statuses = dict.fromkeys(status for pair in paths.pairs for status in pair.statuses if status is not P2P.OK)
        legend = ", ".join(f"{_STATUS_LETTERS.get(status, '?')}: {_status_text(status)}" for status in sorted(statuses))
        order = [gpu.index for gpu in paths.gpus]
        names = tuple(f"GPU {index}" for index in order)
        yield Matrix(
            name=f"p2p.topology.{paths.host.name}",
            title=f"paths between GPUs{f'; P2P is not allowed by NVML: {legend}' if legend else ''}",
            rows=names,
            columns=names,
            cells=tuple(tuple("X" if a == b else cells.get((a, b)) for b in order) for a in order),
            gpus={name: gpu.uuid for name, gpu in zip(names, paths.gpus, strict=True) if gpu.uuid},
        )


def report(seen: Seen[Data]) -> Contribution:
    return Contribution(matrices=tuple(matrices(seen)))


plan = memory_errors.plan
# The deadline of GPU003: without persistence mode the driver initialises each GPU again, in 1 to 3 s.
CHECK: Check[Data] = Check(__name__, "P2P001", "topology", Stage.P2P, Scope.HOST, deadline=45.0)
