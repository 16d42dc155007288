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
from collections.abc import Callable, Iterator

from ddpdiag.checks.api import Check, Scope, Seen, Stage
from ddpdiag.checks.findings import Explained
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.hosts import nvml_fix
from ddpdiag.checks.p2p.host_paths import Data, HostPaths, Pair, host_paths, label, status_of, words
from ddpdiag.checks.p2p.paths_judge import acs, asymmetric, disabled, iommu, refused
from ddpdiag.checks.world import World
from ddpdiag.model import Finding, Matrix
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.iommu import surroundings
from ddpdiag.probes.gpu.paths import P2P, GpuPath, gpu_paths
from ddpdiag.probes.gpu.visibility import nvidia_functions
from ddpdiag.probes.host.kernel import proc_root, sys_root

FINDINGS = {
    "disabled": Explained.warning(
        "P2P is switched off in the driver (registry key), or is not allowed for a pair although it is for most pairs "
        "of these models with the same connection: a bridge that is not seated, another slot or BIOS setting."
    ),
    "asymmetric": Explained.warning("one direction is allowed and the other is not."),
    "no-p2p": Explained.note(
        "the cards or the mainboard do not support P2P, as most consumer cards: expect the bandwidth of shared memory."
    ),
    "acs": Explained(
        "ACS redirects traffic between GPUs that have no NVLink, on a host that is not a virtual machine (which needs "
        "ACS). A warning where a PCIe switch could have carried the traffic, else a note."
    ),
    "iommu": Explained.note(
        "the IOMMU translates addresses for GPUs without NVLinks: the kernel then also sets ACS where it can."
    ),
    "isolated": Explained.note(
        "a control group shows each rank only some of the GPUs, so that NVML reports no paths between the others."
    ),
    "unreadable": Explained.not_seen("NVML returned an error."),
}

# As `nvidia-smi topo -p2p` shows them; it has no letters for the registry key.
_CELLS = {
    P2P.OK: "OK",
    P2P.CHIPSET_NOT_SUPPORTED: "CNS",
    P2P.GPU_NOT_SUPPORTED: "GNS",
    P2P.TOPOLOGY_NOT_SUPPORTED: "TNS",
    P2P.DISABLED_BY_REGKEY: "DR",
    P2P.NOT_SUPPORTED: "NS",
}


def measure(ctx: Context) -> Data:
    # The surroundings first: NVML may hang, and the step then shows it.
    proc, sys = proc_root(os.environ), sys_root(os.environ)
    around = surroundings([function.address for function in nvidia_functions(sys) or ()], proc, sys)
    return Data(paths=gpu_paths(ctx.step), around=around)


def ground(world: World) -> str | None:
    """A pair takes two GPUs on one host; ranks that are bound to one GPU each show one only."""
    reason = devices.ground(world)
    if reason is not None:
        return reason
    arrivals = world.arrivals
    pairs = any(sum(arrivals[rank].gpus for rank in ranks) > 1 for ranks in world.hosts.values())
    return None if pairs else "no host has two GPUs"


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    for paths in host_paths(seen):
        for look in (_unreadable, _isolated, disabled, asymmetric, refused, acs, iommu):
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


def _isolated(seen: Seen[Data], paths: HostPaths) -> Iterator[Finding]:
    if len(paths.shown) > 1 and not all(pair.known for pair in paths.pairs):
        most = max(paths.shown)
        yield seen.finding(
            "isolated",
            "each rank sees GPUs of its own",
            f"{paths.host.name}: no rank sees more than {most} of {len(paths.gpus)} GPUs, so NVML reports no paths "
            "between the others, and CUDA may fail to open their memory (NCCL: 'invalid device ordinal').",
            ranks=paths.host.ranks,
            evidence={"gpus": [label(gpu) for gpu in paths.gpus], "shown": list(paths.shown)},
            fix="Make all GPUs of a host visible to all its ranks (srun --gpus-per-node=N --gpu-bind=none instead of "
            "--gpus-per-task), and let each rank select its GPU by LOCAL_RANK.",
        )


def matrices(seen: Seen[Data]) -> Iterator[Matrix]:
    """How the GPUs of each host are connected; and what NVML reports of P2P, where that is not OK everywhere."""
    for paths in host_paths(seen):
        if any(pair.known for pair in paths.pairs):
            yield _matrix(paths, "topology", "paths between GPUs", _connection)
            if any(pair.works is False for pair in paths.pairs):
                found = {status for pair in paths.pairs for status in pair.statuses} - {P2P.OK}
                legend = ", ".join(f"{_CELLS[status]}: {words(status)}" for status in sorted(found))
                yield _matrix(paths, "status", f"P2P allowed by NVML ({legend})", _allowed)


def _connection(path: GpuPath, pair: Pair) -> str | None:
    return f"NV{path.nvlinks}" if path.nvlinks else None if pair.level is None else pair.level.name


def _allowed(path: GpuPath, _: Pair) -> str | None:
    return None if (status := status_of(path)) is None else _CELLS[status]


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


CHECK = Check(
    "P2P001",
    "topology",
    Stage.P2P,
    Scope.NODE,
    manual=__doc__ or "",
    findings=FINDINGS,
    measure=measure,
    judge=judge,
    data=Data,
    plan=memory_errors.plan,
    ground=ground,
    matrices=lambda seen: tuple(matrices(seen)),
    # As GPU003: without persistence mode the driver starts every GPU anew, for 1 to 3 s each.
    deadline=45.0,
)
