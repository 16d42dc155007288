"""Transport: what NCCL chose between the ranks, from its own log.

NCCL selects a transport for each pair of ranks and falls back without a message: from NVLink or PCIe (P2P) to the
host's memory (SHM), from InfiniBand with GPUDirect RDMA (GDRDMA) to copies through the host, and to plain sockets.
Training then works, at a fraction of the speed. ddpdiag opens its groups with NCCL_DEBUG=INFO and a log file of the
run, whatever NCCL_DEBUG says for the job. This check reads the log of COL001's group: version, network, the path to
each peer, NVLS (NVLink SHARP), algorithms. The paths are in the report's matrix "p2p.transport" and in the ranks'
column.

Findings and their causes:

Fix: do what the finding recommends; run the job once with NCCL_DEBUG=INFO and compare.

Confirm by hand: Run the job once with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,P2P,SHM,GRAPH, and look for ` via
P2P`, ` via SHM`, ` via NET/` and `[send]`.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html); NCCL's
src/transport and src/graph/paths.cc; NCCL issue 1537 (GPUDirect RDMA).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.collective.all_reduce import LARGE_BYTES, SMALL_BYTES
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.p2p import transport_judge as findings
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.transport_judge import Data, transport_log
from ddpdiag.checks.world import ONE_RANK, without_gpu
from ddpdiag.model import Finding, Kind, Matrix, Scalar, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.links import Connections, connections
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import has_peer_memory, rdma_ports
from ddpdiag.probes.net.interfaces import interfaces
from ddpdiag.probes.net.nccl_log import Log, read_log

if TYPE_CHECKING:
    import torch

FINDINGS = {
    "sockets": FindingSpec(
        "hosts communicate over sockets although their InfiniBand ports are up: NCCL_IB_DISABLE, NCCL_NET=Socket, "
        "libibverbs or /dev/infiniband missing in the container; an NCCL_IB_HCA that matches no port is reported by "
        "HST007. EFA ports need the plugin aws-ofi-nccl. (RoCE ports: INFO only, since clouds show some that reach no "
        "other host.)"
    ),
    "no-gdr": FindingSpec(
        "some hosts, or all, do not use GPUDirect RDMA: nvidia-peermem not loaded and no DMA-BUF, GPU and adapter "
        "too far apart, NCCL_NET_GDR_LEVEL."
    ),
    "inside": FindingSpec.warning(
        "ranks of one host communicate over shared memory or the network although NVLinks connect their GPUs: "
        "NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, NCCL_HOSTID (LCH002), containers that do not see each other's GPUs."
    ),
    "nvls": FindingSpec(
        "some GPUs offer NVLink SHARP and others do not; NCCL then uses it nowhere. Check the fabric manager."
    ),
    "mixed-versions": FindingSpec.error(
        "ranks load different NCCLs, although torch reports the same one (LCH003): LD_LIBRARY_PATH, LD_PRELOAD."
    ),
    "warned": FindingSpec.note("warnings in NCCL's own log."),
    "unreadable": FindingSpec.not_seen(
        "NCCL wrote no log, or none that this version understands, so the transport is not known."
    ),
}

# A matrix of more ranks is too large to read.
MOST_RANKS = 16


def measure(ctx: Context) -> Data:
    """Two all-reduces, and what NCCL wrote about the group since it was opened."""
    from ddpdiag.workloads.collectives import check_all_reduce
    from ddpdiag.workloads.group import process_group

    with process_group(ctx, str(ctx.trial.params["backend"])) as device:
        check_all_reduce(ctx, SMALL_BYTES, device)
        check_all_reduce(ctx, LARGE_BYTES[ctx.options.depth], device)
    return read(ctx, device)


def read(ctx: Context, device: "torch.device") -> Data:
    """NCCL's log, and the links of the GPU and of the host."""
    import torch

    from ddpdiag.workloads.devices import describe
    from ddpdiag.workloads.group import nccl_log

    ctx.step("read NCCL's log")
    log = read_log(nccl_log(ctx))
    root, uuid = sys_root(os.environ), describe(device).uuid
    names = () if log is None else log.sockets
    known = [interface.bytes_per_s for interface in interfaces(root) or () if interface.name in names]
    rates = [rate for rate in known if rate is not None]
    return Data(
        log=None if log is None else _as_ranks(log, ctx.group),
        gpu_uuid=uuid,
        links=connections(uuid, torch.cuda.get_device_capability(device)) if uuid else Connections(),
        ports=rdma_ports(root),
        socket_bytes_per_s=sum(rates) if rates and len(rates) == len(names) else None,
        peer_memory=has_peer_memory(root),
    )


def _as_ranks(log: Log, group: Sequence[int]) -> Log:
    """The log with the job's ranks in place of NCCL's, which count within the group."""
    hops = (hop for hop in log.hops if max(hop.source, hop.target, *hop.through) < len(group))
    links = {rank: peers for rank, peers in log.nvlinked.items() if max(rank, *peers) < len(group)}
    return structs.replace(
        log,
        hops=tuple(
            structs.replace(
                hop,
                source=group[hop.source],
                target=group[hop.target],
                through=tuple(group[rank] for rank in hop.through),
            )
            for hop in hops
        ),
        nvlinked={group[rank]: tuple(group[peer] for peer in peers) for rank, peers in links.items()},
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """One trial, with the variables that the job needs: it shares COL001's group where that went well as it is."""
    env = fallback.job_workarounds(seen)
    return () if seen.trials else (new_trial(seen, params={"backend": seen.world.backend}, env=env),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Only NCCL has transports to choose from, and between GPUs of several ranks."""
    if seen.world.size == 1:
        return inapplicable(ONE_RANK)
    if seen.world.backend != "nccl":
        return inapplicable(f"the backend is {seen.world.backend}; only nccl has several transports")
    return inapplicable(without_gpu(seen.world)) or fallback.blocks(seen)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    nccl = transport_log(seen)
    yield from findings.unreadable(nccl)
    yield from findings.versions(nccl)
    # With workarounds, NCCL uses the paths that are left.
    if not fallback.needed(seen.of(fallback.CHECK)).needed:
        yield from findings.sockets(nccl)
        yield from findings.gpudirect(nccl)
        yield from findings.inside(nccl)
    yield from findings.nvls(nccl)
    yield from findings.warned(nccl)


def columns(seen: Seen[Data]) -> Mapping[int, Mapping[str, Scalar]]:
    """The paths that each rank uses, such as "P2P/CUMEM, NET/IB/GDRDMA, COLLNET/SHARP, NVLS"."""
    nccl = transport_log(seen)
    texts = {rank: {"NVLS"} if log.nvls_channels else set() for rank, log in nccl.logs.items()}
    for rank, log in nccl.logs.items():
        texts[rank] |= {f"COLLNET/{log.collnet}"} if log.collnet else set()
    for hop in nccl.hops:
        for rank in nccl.logs.keys() & {hop.source, hop.target}:
            texts[rank].add(hop.text)
    ordered = partial(sorted, key=lambda text: (text == "NVLS", text.startswith("NET"), text))
    return {rank: {"transport": ", ".join(ordered(own))} for rank, own in texts.items()}


def figures(seen: Seen[Data]) -> Mapping[str, Scalar]:
    """NCCL's version and network, and the algorithm for each size, as the first rank that reports them has it."""
    logs = transport_log(seen).logs.values()
    names = {
        "nccl.version": next((log.version for log in logs if log.version), None),
        "nccl.network": next((log.network for log in logs if log.network), None),
    }
    choices = next((log.choices for log in logs if log.choices), ())
    return {name: value for name, value in names.items() if value is not None} | {
        f"nccl.algorithm.{own.bytes}": f"{own.algorithm}/{own.protocol}" for own in choices
    }


def matrices(seen: Seen[Data]) -> Iterator[Matrix]:
    """From rank to rank, where NCCL opened a path; others go through peers, or through NVLS."""
    nccl = transport_log(seen)
    ranks = tuple(nccl.rows)
    if not nccl.hops or len(ranks) > MOST_RANKS:
        return
    texts: dict[tuple[int, int], list[str]] = {}
    for hop in nccl.hops:
        texts.setdefault((hop.source, hop.target), []).append(hop.text)
    names = tuple(f"rank {rank}" for rank in ranks)
    cells = tuple(tuple(", ".join(sorted(texts.get((a, b), []))) or None for b in ranks) for a in ranks)
    yield Matrix(name="p2p.transport", title="NCCL's transport", rows=names, columns=names, cells=cells)


def report(seen: Seen[Data]) -> Contribution:
    """All that the check adds to the report."""
    return Contribution(columns=columns(seen), figures=figures(seen), matrices=tuple(matrices(seen)))


# Where COL001 left no group, a new context and a new communicator: 1 to 4 s on 8 GPUs.
CHECK: Check[Data] = Check(__name__, "P2P004", "transport", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=20)
