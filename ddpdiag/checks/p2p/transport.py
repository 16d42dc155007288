"""The transports that NCCL chose between the ranks, from NCCL's own log.

NCCL selects a transport for each pair of ranks and falls back without a message: from NVLink or PCIe (P2P) to the
host's memory (SHM), from InfiniBand with GPUDirect RDMA (GDRDMA) to copies through the host, and to plain sockets.
Training then works, at a fraction of the speed. ddpdiag opens its groups with NCCL_DEBUG=INFO and a log file of the
run, whatever NCCL_DEBUG says for the job. This check reads the log of COL001's group: the path to each peer, and NVLS
(NVLink SHARP). The ranks' table shows them.

Findings and their causes:

Fix: do what the finding recommends; run the job once with NCCL_DEBUG=INFO and compare.

Confirm by hand: Run the job once with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,P2P,SHM,GRAPH, and look for ` via
P2P`, ` via SHM`, ` via NET/` and `[send]`.

Sources: NCCL user guide, environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html); NCCL's
src/transport and src/graph/paths.cc; NCCL issue 1537 (GPUDirect RDMA).
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.collective.all_reduce import LARGE_BYTES, SMALL_BYTES
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.odd import no_majority
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.p2p.paths import host_paths
from ddpdiag.checks.world import ONE_RANK_REASON, no_gpu_reason
from ddpdiag.model import Finding, Kind, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.links import Connections, connections
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import Port, has_peer_memory, rdma_ports
from ddpdiag.probes.net.nccl_log import Hop, NcclLog, read_log
from ddpdiag.text import count

FINDINGS = {
    "sockets": FindingSpec(
        "hosts communicate over sockets although their InfiniBand ports are up: NCCL_IB_DISABLE, NCCL_NET=Socket, "
        "libibverbs or /dev/infiniband missing in the container; an NCCL_IB_HCA that matches no port is reported by "
        "HST007. EFA ports need the plugin aws-ofi-nccl. (RoCE ports: a note only, since clouds show some that reach "
        "no other host.)"
    ),
    "no-gdr": FindingSpec(
        "some hosts, or all, do not use GPUDirect RDMA: nvidia-peermem not loaded and no DMA-BUF, GPU and adapter "
        "too far apart, NCCL_NET_GDR_LEVEL."
    ),
    "inside": FindingSpec.warning(
        "ranks of one host communicate over shared memory or the network although NVLinks connect their GPUs: "
        "NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, NCCL_HOSTID (LCH002), containers that do not see each other's GPUs."
    ),
    "warned": FindingSpec.note("warnings in NCCL's own log."),
    "unreadable": FindingSpec.unchecked(
        "NCCL wrote no log, or none that this version understands, so the transport is not known."
    ),
}

SOCKET = "Socket"
_PORTS_FIX = (
    "Unset NCCL_IB_DISABLE and NCCL_NET, unless P2P003 of this report needs them. Run `ibv_devinfo` where the job "
    "runs: it must show these ports (a container needs libibverbs, /dev/infiniband and an unlimited `ulimit -l`), and "
    "NCCL_IB_HCA, if set, must name them."
)
# The folders of AWS's EFA installer, which contains the plugin since 2025 (NeMo-RL issue 1973, pull request 2585).
_PLUGIN_FIX = (
    "Install AWS's EFA installer, which contains aws-ofi-nccl, in the image, and in the job script `export "
    "LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH NCCL_NET_PLUGIN=ofi`. A container "
    "needs /dev/infiniband. NCCL_NET must not be set to Socket."
)
# Variables that change the transport that NCCL chooses.
_VARIABLES = (
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IBVERBS_LIB", "NCCL_NET_GDR_LEVEL",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_HOSTID", "NCCL_NVLS_ENABLE",
)  # fmt: skip


class Data(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of one rank: NCCL's log (None: NCCL wrote none), the GPU and its links, and the host's RDMA ports.

    `peer_memory`: whether the kernel module nvidia-peermem is loaded.
    """

    log: NcclLog | None = None
    gpu_uuid: str | None = None
    links: Connections = Connections()
    ports: tuple[Port, ...] = ()
    peer_memory: bool = False

    @property
    def usable_ports(self) -> tuple[Port, ...]:
        """The RDMA ports that are up: those of InfiniBand if there are any, else of RoCE, else those for a plugin."""
        up = tuple(port for port in self.ports if port.active)
        without_plugin = (port for port in up if not port.needs_plugin)
        return tuple(port for port in up if port.infiniband) or tuple(without_plugin) or up

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The paths between ranks in NCCL's log; empty if there is no log."""
        return self.log.hops if self.log is not None else ()


def measure(ctx: Context) -> Data:
    """Run two all-reduces, then read the group's NCCL log, the links of the GPU, and the host's RDMA ports."""
    import torch

    from ddpdiag.workloads.collectives import check_all_reduce
    from ddpdiag.workloads.devices import describe
    from ddpdiag.workloads.group import nccl_log_file, process_group

    with process_group(ctx, str(ctx.trial.params["backend"])) as device:
        check_all_reduce(ctx, SMALL_BYTES, device)
        check_all_reduce(ctx, LARGE_BYTES[ctx.options.depth], device)
    ctx.step("read NCCL's log")
    log = read_log(nccl_log_file(ctx))
    root, uuid = sys_root(os.environ), describe(device).uuid
    return Data(
        log=None if log is None else _with_job_ranks(log, ctx.group),
        gpu_uuid=uuid,
        links=connections(uuid, torch.cuda.get_device_capability(device)) if uuid else Connections(),
        ports=rdma_ports(root),
        peer_memory=has_peer_memory(root),
    )


def _with_job_ranks(log: NcclLog, group: Sequence[int]) -> NcclLog:
    """Replace NCCL's ranks, which are positions in `group`, by the job's ranks."""
    hops = (hop for hop in log.hops if max(hop.source, hop.target) < len(group))
    return structs.replace(
        log, hops=tuple(structs.replace(hop, source=group[hop.source], target=group[hop.target]) for hop in hops)
    )


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan one trial, with P2P003's workarounds. Without workarounds it shares the process group of COL001."""
    env = fallback.job_workarounds(seen)
    return () if seen.trials else (new_trial(seen, params={"backend": seen.world.backend}, env=env),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip if NCCL chooses no transport: with one rank, without GPUs, or if the backend is not nccl or fails."""
    if seen.world.size == 1:
        return inapplicable(ONE_RANK_REASON)
    if seen.world.backend != "nccl":
        return inapplicable(f"the backend is {seen.world.backend}; only nccl has several transports")
    return inapplicable(no_gpu_reason(seen.world)) or fallback.skip_failing_backend(seen)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    logs = {rank: data.log for rank, data in sorted(seen.by_rank.items()) if data.log is not None}
    yield from unreadable_findings(seen)
    # A workaround excludes paths on purpose, so the remaining paths are not judged.
    if not fallback.job_workarounds(seen):
        yield from socket_findings(seen, logs)
        yield from gpudirect_findings(seen, logs)
        yield from inside_findings(seen, logs)
    yield from warning_findings(seen, logs)


def _hops(seen: Seen[Data], *, inside: bool) -> list[Hop]:
    """The paths in all ranks' logs, each once: those inside a host if `inside`, else those between hosts."""
    hosts = {rank: host for host, ranks in seen.world.hosts.items() for rank in ranks}
    hops = {(hop.source, hop.target, hop.text): hop for data in seen.by_rank.values() for hop in data.hops}
    return [hop for hop in hops.values() if (hosts.get(hop.source) == hosts.get(hop.target)) is inside]


def _reasons(logs: Mapping[int, NcclLog], ranks: Sequence[int]) -> list[str]:
    """The reasons for NCCL's choice on these ranks: variables that are set, and notes in NCCL's log."""
    rank_logs = [logs[rank] for rank in ranks if rank in logs]
    settings = (f"{name}={log.settings[name]}" for log in rank_logs for name in _VARIABLES if name in log.settings)
    return list(dict.fromkeys((*settings, *(f"'{note}'" for log in rank_logs for note in log.notes))))


def _reasons_text(reasons: Sequence[str]) -> str:
    return f"The likely reason: {', '.join(reasons)}." if reasons else "NCCL's log does not show why."


def unreadable_findings(seen: Seen[Data]) -> Iterator[Finding]:
    """The finding that the logs of some ranks show neither a path nor NVLS."""
    rows = seen.by_rank
    ranks = tuple(rank for rank, row in rows.items() if not (row.hops or (row.log and row.log.nvls_channels)))
    if ranks:
        yield seen.finding(
            "unreadable",
            "NCCL's log does not show how ranks communicate",
            f"NCCL's log on {ranks_text(ranks)} (of {count(len(rows), 'rank')}) shows no path to any peer, so it is "
            "not known which transport is used.",
            ranks=ranks,
            fix="Run the job once with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,P2P,SHM; the lines "
            "with 'via' name the transport of each pair.",
        )


def socket_findings(seen: Seen[Data], logs: Mapping[int, NcclLog]) -> Iterator[Finding]:
    """The finding on TCP sockets between hosts that both have RDMA ports up, unless HST007 reports the reason."""
    host_of = seen.world.host_name
    explained_hosts = {host for each in seen.findings_of("HST007") if each.code == "HST007.hca" for host in each.hosts}
    usable_ports = {host_of(rank): data.usable_ports for rank, data in seen.by_rank.items()}
    ranks = set()
    for hop in _hops(seen, inside=False):
        ends = {host_of(hop.source), host_of(hop.target)}
        if (hop.kind, hop.name) == ("NET", SOCKET) and not ends & explained_hosts and all(map(usable_ports.get, ends)):
            ranks |= {hop.source, hop.target}
    if not ranks:
        return
    first, *_ = hosts = seen.world.host_names(sorted(ranks))
    ports = [port for host in hosts for port in usable_ports[host]]
    needs_plugin = any(port.needs_plugin for port in ports)
    kind = "EFA" if needs_plugin else "InfiniBand" if all(port.infiniband for port in ports) else "RoCE"
    names = names_text([port.name for port in usable_ports[first]], 4)
    interfaces = sorted({name for rank in ranks if rank in logs for name in logs[rank].sockets})
    reasons = _reasons(logs, sorted(ranks))
    why = "NCCL takes these ports only through the plugin aws-ofi-nccl (libnccl-net.so)." if needs_plugin else ""
    yield seen.finding(
        "sockets",
        f"NCCL uses TCP sockets, not {kind}",
        f"NCCL sends over TCP sockets ({names_text(interfaces, 4) or 'interface unknown'}) between {names_text(hosts)}"
        f", although {kind} ports are up on both ends ({names} on {first}). {why or _reasons_text(reasons)}",
        severity=Severity.NOTE if kind == "RoCE" else Severity.WARNING,
        ranks=sorted(ranks),
        evidence={"interfaces": [*interfaces], "reasons": [*reasons]},
        fix=_PLUGIN_FIX if needs_plugin else _PORTS_FIX,
    )


def gpudirect_findings(seen: Seen[Data], logs: Mapping[int, NcclLog]) -> Iterator[Finding]:
    """The finding that some hosts do not use GPUDirect RDMA, or that no host does although NCCL uses InfiniBand."""
    outside = [hop for hop in _hops(seen, inside=False) if hop.kind == "NET" and hop.name != SOCKET]
    ends = {rank for hop in outside for rank in (hop.source, hop.target)} & logs.keys()
    # Each rank chooses separately. One direction is enough: NCCL reads GPUs directly from Ampere on (graph/paths.cc).
    ranks_without = sorted(rank for rank in ends if not any(hop.gdr for hop in logs[rank].hops))
    hosts, hosts_without = seen.world.host_names(sorted(ends)), seen.world.host_names(ranks_without)
    some_use_it = len(hosts_without) < len(hosts)
    is_missing_everywhere = len(ranks_without) == len(ends) and any(hop.name.startswith("IB") for hop in outside)
    if not hosts_without or not (some_use_it or is_missing_everywhere):
        return
    odd_hosts = hosts_without if some_use_it and 2 * len(hosts_without) < len(hosts) else ()
    level = next((value for rank in ranks_without if (value := logs[rank].settings.get("NCCL_NET_GDR_LEVEL"))), None)
    reason = f" NCCL_NET_GDR_LEVEL={level} is set." if level else ""
    if not reason and not any(seen.by_rank[rank].peer_memory for rank in ranks_without):
        reason = " nvidia-peermem is not loaded there."
    yield seen.finding(
        "no-gdr",
        "some hosts do not use GPUDirect RDMA" if some_use_it else "InfiniBand is used without GPUDirect RDMA",
        f"On {names_text(hosts_without)} ({len(hosts_without)} of {count(len(hosts), 'host')}) data goes to the "
        "network through the host's memory, without GPUDirect RDMA."
        f"{no_majority(odd_hosts, 'host') if some_use_it else ''}{reason}",
        severity=Severity.WARNING if some_use_it else Severity.NOTE,
        ranks=ranks_without if odd_hosts else (),
        hosts=odd_hosts,
        evidence={"without": [*hosts_without]},
        fix="If the GPUs support it (no GeForce does), run `modprobe nvidia-peermem` as root there, or install a "
        "driver and kernel with DMA-BUF. NCCL_NET_GDR_LEVEL must be the same on all hosts.",
    )


def inside_findings(seen: Seen[Data], logs: Mapping[int, NcclLog]) -> Iterator[Finding]:
    """Findings on hosts whose ranks communicate without the NVLinks between their GPUs, or over sockets."""
    rows = seen.by_rank
    pairs = [pair for host in host_paths(seen.of(paths.CHECK)) for pair in host.pairs if pair.has_nvlinks]
    linked_uuids = {frozenset((pair.one.uuid, pair.other.uuid)) for pair in pairs}

    def are_linked(hop: Hop) -> bool:
        ends = [rows[rank] for rank in (hop.source, hop.target) if rank in rows]
        switched = len(ends) == 2 and all(data.links.nvlink_switched and data.links.nvlinks for data in ends)
        return switched or frozenset(data.gpu_uuid for data in ends) in linked_uuids

    by_host: dict[str, list[Hop]] = defaultdict(list)
    for hop in _hops(seen, inside=True):
        # For GPUs that only PCIe connects, shared memory, or the network over adapters, may be faster than P2P.
        if (hop.kind != "P2P" and are_linked(hop)) or (hop.kind, hop.name) == ("NET", SOCKET):
            by_host[seen.world.host_name(hop.source)].append(hop)
    for host, hops in by_host.items():
        ranks = sorted({rank for hop in hops for rank in (hop.source, hop.target)})
        with_nvlinks = any(map(are_linked, hops))
        reasons = _reasons(logs, ranks)
        yield seen.finding(
            "inside",
            "ranks of one host do not use NVLink" if with_nvlinks else "ranks of one host communicate over sockets",
            f"{host}: {ranks_text(ranks)} communicate over {', '.join(sorted({hop.text for hop in hops}))} (rank "
            f"{hops[0].source} to rank {hops[0].target}), although "
            f"{'NVLinks connect their GPUs' if with_nvlinks else 'P2P or shared memory is available'}. P2P is "
            f"expected. {_reasons_text(reasons)}",
            ranks=ranks,
            gpus=[uuid for rank in ranks if rank in rows and (uuid := rows[rank].gpu_uuid)],
            evidence={"paths": [f"{hop.source} -> {hop.target} {hop.text}" for hop in hops], "reasons": [*reasons]},
            fix="Unset NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, NCCL_SHM_DISABLE and NCCL_HOSTID, unless P2P003 of this "
            "report needs them. All containers of a host must share its GPUs, IPC namespace and host name (docker "
            "--gpus all --ipc=host --uts=host).",
        )


def warning_findings(seen: Seen[Data], logs: Mapping[int, NcclLog]) -> Iterator[Finding]:
    """The finding that lists NCCL's warnings, each text once with the ranks that logged it."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, log in logs.items():
        for text in log.warnings:
            ranks[text].append(rank)
    if ranks:
        lines = [f"{ranks_text(text_ranks)}: {text}" for text, text_ranks in ranks.items()]
        yield seen.finding(
            "warned",
            "NCCL printed warnings",
            f"NCCL printed warnings although the all-reduces worked: {names_text(lines)}.",
            hosts=seen.world.host_names(sorted({rank for text_ranks in ranks.values() for rank in text_ranks})),
            evidence={"warnings": [*lines]},
            fix="Give NCCL's output to `ddpdiag explain FILE`, which knows causes of many warnings. 'Got async event' "
            "means a link that goes down and up: have its cable checked.",
            known_error=known_error(*(f"NCCL WARN {text}" for text in ranks)),
        )


def report(seen: Seen[Data]) -> Contribution:
    """The column `transport` of the ranks' table: the paths of each rank, such as "P2P/CUMEM, NET/IB/GDRDMA, NVLS"."""
    texts = {rank: {"NVLS"} if row.log.nvls_channels else set() for rank, row in seen.by_rank.items() if row.log}
    for hop in (*_hops(seen, inside=True), *_hops(seen, inside=False)):
        for rank in texts.keys() & {hop.source, hop.target}:
            texts[rank].add(hop.text)
    ordered = partial(sorted, key=lambda text: (text == "NVLS", text.startswith("NET"), text))
    columns: dict[int, Mapping[str, Scalar]] = {
        rank: {"transport": ", ".join(ordered(rank_texts))} for rank, rank_texts in texts.items()
    }
    return Contribution(columns=columns)


# If COL001 left no open group, a new context and a new communicator take 1 to 4 s on 8 GPUs.
CHECK: Check[Data] = Check(__name__, "P2P004", "transport", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=20)
