"""Transport: what NCCL chose between the ranks, from its own log.

NCCL selects a transport for each pair of ranks and falls back without a message: from NVLink or PCIe (P2P) to the
host's memory (SHM), from InfiniBand with GPUDirect RDMA (GDRDMA) to copies through the host, and to plain sockets.
Training then works, at a fraction of the speed. ddpdiag opens its groups with NCCL_DEBUG=INFO and a log file of the
run, whatever NCCL_DEBUG says for the job. This check reads the log of COL001's group: version, network, the path to
each peer, NVLS (NVLink SHARP). The paths are in the report's matrix "p2p.transport" and in the ranks'
column.

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
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, inapplicable, new_trial
from ddpdiag.checks.collective.all_reduce import LARGE_BYTES, SMALL_BYTES
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import names_text, odd_text, ranks_text
from ddpdiag.checks.known_errors import known_error
from ddpdiag.checks.launch import variables
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.checks.odd import no_majority, odd_finding
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.world import ONE_RANK, without_gpu
from ddpdiag.model import Finding, Kind, Matrix, Scalar, Severity, Trial
from ddpdiag.model.trial import Context
from ddpdiag.probes.gpu.links import Connections, connections
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import Port, has_peer_memory, rdma_ports
from ddpdiag.probes.net.nccl_log import Hop, Log, read_log
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count

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

SOCKET = "Socket"
_WITHOUT_PLUGIN = (
    "Unset NCCL_IB_DISABLE and NCCL_NET, unless P2P003 of this report needs them. Run `ibv_devinfo` where the job "
    "runs: it must show these ports (a container needs libibverbs, /dev/infiniband and an unlimited `ulimit -l`), and "
    "NCCL_IB_HCA, if set, must name them."
)
# The folders of AWS's EFA installer since 2025, which has the plugin; NeMo-RL issue 1973 and pull request 2585.
_WITH_PLUGIN = (
    "Install AWS's EFA installer, which contains aws-ofi-nccl, in the image, and in the job script `export "
    "LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH NCCL_NET_PLUGIN=ofi`. A container "
    "needs /dev/infiniband. NCCL_NET must not be set to Socket."
)
# Variables by which users choose a transport, and those that follow from it.
_CHOOSING = (
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IBVERBS_LIB", "NCCL_NET_GDR_LEVEL",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_HOSTID", "NCCL_NVLS_ENABLE",
)  # fmt: skip
# A matrix of more ranks is too large to read.
MOST_RANKS = 16


class Data(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank: NCCL's log (None: it wrote none), its GPU and NVLinks, and the host's network.

    `peer_memory`: whether nvidia-peermem is loaded.
    """

    log: Log | None = None
    gpu_uuid: str | None = None
    links: Connections = Connections()
    ports: tuple[Port, ...] = ()
    peer_memory: bool = False

    @property
    def usable_ports(self) -> tuple[Port, ...]:
        """The RDMA ports that are up: InfiniBand where there is any, else RoCE, else those that need a plugin."""
        up = tuple(port for port in self.ports if port.active)
        own = (port for port in up if not port.needs_plugin)
        return tuple(port for port in up if port.infiniband) or tuple(own) or up

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The paths in NCCL's log."""
        return self.log.hops if self.log is not None else ()


@dataclass(frozen=True)
class TransportLog:
    """All ranks' logs together."""

    seen: Seen[Data]

    @property
    def rows(self) -> Mapping[int, Data]:
        return self.seen.by_rank

    @cached_property
    def logs(self) -> Mapping[int, Log]:
        """The logs of the ranks that have one."""
        return {rank: data.log for rank, data in sorted(self.rows.items()) if data.log is not None}

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Every path once, from the logs of both ends."""
        hops = (hop for log in self.logs.values() for hop in log.hops)
        return tuple({(hop.source, hop.target, hop.text): hop for hop in hops}.values())

    @cached_property
    def _hosts(self) -> Mapping[int, tuple[str, str]]:
        return {rank: host for host, ranks in self.seen.world.hosts.items() for rank in ranks}

    def is_inside(self, hop: Hop) -> bool:
        """Whether both ends are on one host."""
        return hop.source in self._hosts and self._hosts[hop.source] == self._hosts.get(hop.target)

    @cached_property
    def outside(self) -> tuple[Hop, ...]:
        """Paths over the network from host to host; with MNNVL there are others."""
        return tuple(hop for hop in self.hops if hop.kind == "NET" and not self.is_inside(hop))

    def are_linked(self, one: int, other: int) -> bool:
        """Whether NVLinks lead from the GPU of one rank to that of the other, by NCCL's map of the host or by NVML's.

        NCCL's map lacks the GPUs of ranks that it takes to be on another host (NCCL_HOSTID); NVML's knows of a switch.
        """
        log = self.logs.get(one)
        if log is not None and other in log.nvlinked.get(one, ()):
            return True
        both = [self.rows[rank].links for rank in (one, other) if rank in self.rows]
        return len(both) == 2 and all(links.nvlink_switched and links.nvlinks for links in both)

    def ports(self, host: str) -> tuple[Port, ...]:
        """The RDMA ports of a host that NCCL may use."""
        return self._ports.get(host, ())

    @cached_property
    def _ports(self) -> Mapping[str, tuple[Port, ...]]:
        return {self.seen.world.host_of(rank): data.usable_ports for rank, data in self.rows.items()}

    def reasons(self, ranks: Sequence[int], names: Sequence[str] = _CHOOSING) -> tuple[str, ...]:
        """Why NCCL chose so on these ranks: variables that are set, and its own messages."""
        settings = map(self.settings, ranks)
        variables = (f"{name}={found[name]}" for found in settings for name in names if name in found)
        notes = (f"'{note}'" for rank in ranks if rank in self.logs for note in self.logs[rank].notes)
        return tuple(dict.fromkeys((*variables, *notes)))

    def settings(self, rank: int) -> Mapping[str, str]:
        """The variables of a rank that decide on transports: as LCH002 saw them, and as NCCL did."""
        known: dict[str, str] = {}
        if own := self._environments.get(rank):
            known = dict(chain.from_iterable(row.items() for row in own.files.values())) | dict(own.variables)
        known |= self.logs[rank].settings if rank in self.logs else {}
        return {name: value for name, value in known.items() if name in _CHOOSING}

    @cached_property
    def _environments(self) -> Mapping[int, variables.Data]:
        return self.seen.of(variables.CHECK).by_rank


@lru_cache(maxsize=1)
def transport_log(seen: Seen[Data]) -> TransportLog:
    """All ranks' logs, put together once."""
    return TransportLog(seen)


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
    return Data(
        log=None if log is None else _as_ranks(log, ctx.group),
        gpu_uuid=uuid,
        links=connections(uuid, torch.cuda.get_device_capability(device)) if uuid else Connections(),
        ports=rdma_ports(root),
        peer_memory=has_peer_memory(root),
    )


def _as_ranks(log: Log, group: Sequence[int]) -> Log:
    """The log with the job's ranks in place of NCCL's, which count within the group."""
    hops = (hop for hop in log.hops if max(hop.source, hop.target) < len(group))
    links = {rank: peers for rank, peers in log.nvlinked.items() if max(rank, *peers) < len(group)}
    return structs.replace(
        log,
        hops=tuple(structs.replace(hop, source=group[hop.source], target=group[hop.target]) for hop in hops),
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
    yield from unreadable(nccl)
    yield from versions(nccl)
    # With workarounds, NCCL uses the paths that are left.
    if not fallback.job_workarounds(seen):
        yield from sockets(nccl)
        yield from gpudirect(nccl)
        yield from inside(nccl)
    yield from nvls(nccl)
    yield from warned(nccl)


def unreadable(nccl: TransportLog) -> Iterator[Finding]:
    """Ranks whose log shows no path."""
    silent = tuple(rank for rank, row in nccl.rows.items() if not (row.hops or (row.log and row.log.nvls_channels)))
    if silent:
        versions = sorted({log.version for rank in silent if (log := nccl.logs.get(rank)) and log.version})
        which = f" (version {', '.join(versions)})" if versions else ""
        yield nccl.seen.finding(
            "unreadable",
            "NCCL's log does not show how ranks communicate",
            f"NCCL's log{which} on {ranks_text(silent)} (of {count(len(nccl.rows), 'rank')}) shows no path to any "
            "peer, so it is not known which transport is used.",
            ranks=silent,
            fix="Run the job once with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,P2P,SHM; the lines "
            "with 'via' name the transport of each pair.",
        )


def versions(nccl: TransportLog) -> Iterator[Finding]:
    """Different NCCLs, unless LCH003 reports them already."""
    odd = odd_ones_out({rank: log.version for rank, log in nccl.logs.items() if log.version})
    told = {own.nccl for own in nccl.seen.of(lch003.CHECK).by_rank.values()}
    if odd is None or len(told) > 1:
        return
    yield odd_finding(
        nccl.seen,
        "mixed-versions",
        odd,
        "ranks load different versions of NCCL",
        f"The loaded version of NCCL differs: {odd_text(odd, missing='none')}. Every rank must load the same version.",
        fix="Use one container image or Python environment on every host. If LD_LIBRARY_PATH or LD_PRELOAD of the job "
        "names another libnccl.so, remove it there.",
    )


def sockets(nccl: TransportLog) -> Iterator[Finding]:
    """Sockets between hosts whose InfiniBand (or RoCE) ports are up on both ends, unless HST007 reports why."""
    told = {node for own in nccl.seen.findings_of("HST007") if own.code == "HST007.hca" for node in own.hosts}
    crossing = [hop for hop in nccl.outside if hop.name == SOCKET]
    ends = [(hop, {nccl.seen.world.host_of(hop.source), nccl.seen.world.host_of(hop.target)}) for hop in crossing]
    taken = [hop for hop, hosts in ends if not hosts & told and all(map(nccl.ports, hosts))]
    ranks = sorted({rank for hop in taken for rank in (hop.source, hop.target)})
    if not ranks:
        return
    first, *_ = hosts = nccl.seen.world.hosts_of(ranks)
    ports = [port for host in hosts for port in nccl.ports(host)]
    plugin = any(port.needs_plugin for port in ports)
    kind = "EFA" if plugin else "InfiniBand" if all(port.infiniband for port in ports) else "RoCE"
    names = names_text([port.name for port in nccl.ports(first)], 4)
    wires = sorted({name for rank in ranks if rank in nccl.logs for name in nccl.logs[rank].sockets})
    why = nccl.reasons(ranks)
    said, fix = _why(why), _WITHOUT_PLUGIN
    if plugin:
        needed = "NCCL takes these ports only through the plugin aws-ofi-nccl (libnccl-net.so)."
        said, fix = f"{needed} {said}" if why else needed, _WITH_PLUGIN
    yield nccl.seen.finding(
        "sockets",
        f"NCCL uses TCP sockets, not {kind}",
        f"NCCL sends over TCP sockets ({names_text(wires, 4) or 'interface unknown'}) between {names_text(hosts)}, "
        f"although {kind} ports are up on both ends ({names} on {first}). {said}",
        severity=Severity.NOTE if kind == "RoCE" else Severity.WARNING,
        ranks=ranks,
        evidence={"interfaces": list(wires), "reasons": list(why)},
        fix=fix,
    )


def _why(reasons: Sequence[str]) -> str:
    return f"The likely reason: {', '.join(reasons)}." if reasons else "NCCL's log does not show why."


def gpudirect(nccl: TransportLog) -> Iterator[Finding]:
    """GPUDirect RDMA on some hosts and not on others; or on none, although they have InfiniBand."""
    ends = {rank for hop in nccl.outside if hop.name != SOCKET for rank in (hop.source, hop.target)} & nccl.logs.keys()
    # Each end decides for itself. One direction is enough: GPUs before Ampere are not read directly (graph/paths.cc).
    direct = {rank for rank in ends if any(hop.gdr for hop in nccl.logs[rank].hops)}
    host_of = nccl.seen.world.host_of
    having = {host_of(rank): True for rank in sorted(ends)} | {host_of(rank): False for rank in ends - direct}
    if len(set(having.values())) > 1:
        without = [host for host, has in having.items() if not has]
        odd = without if 2 * len(without) < len(having) else []
        blame = no_majority(odd, "host")
        ranks = sorted(ends - direct)
        yield nccl.seen.finding(
            "no-gdr",
            "some hosts do not use GPUDirect RDMA",
            f"On {names_text(without)} data goes to the network through the host's memory; "
            f"{len(having) - len(without)} of {len(having)} hosts use GPUDirect RDMA. All hosts wait for the slowest."
            f"{blame} {_gdr_reason(nccl, ranks)}",
            severity=Severity.WARNING,
            ranks=ranks if odd else (),
            hosts=odd,
            evidence={"without": [*without]},
            fix=f"On {names_text(without)} run `modprobe nvidia-peermem` as root, or install a driver and kernel with "
            "DMA-BUF as on the other hosts. NCCL_NET_GDR_LEVEL must be the same on all hosts.",
        )
    elif ends and not direct and any(hop.name.startswith("IB") for hop in nccl.outside):
        ranks = sorted(ends)
        yield nccl.seen.finding(
            "no-gdr",
            "InfiniBand is used without GPUDirect RDMA",
            "On no rank does the network adapter access the GPU's memory directly; data goes through the host's "
            f"memory. {_gdr_reason(nccl, ranks)}",
            severity=Severity.NOTE,
            evidence={"reasons": list(nccl.reasons(ranks, ("NCCL_NET_GDR_LEVEL",)))},
            fix="If the GPUs support it (no GeForce does), run `modprobe nvidia-peermem` as root on every host, or "
            "use a driver and kernel with DMA-BUF.",
        )


def _gdr_reason(nccl: TransportLog, ranks: Sequence[int]) -> str:
    able = [name for rank in ranks for name, has in nccl.logs[rank].gdr.items() if has]
    levels = (nccl.settings(rank).get("NCCL_NET_GDR_LEVEL") for rank in ranks)
    level = next((level for level in levels if level is not None), None)
    if able and level is not None:
        return f"{able[0]} supports it; NCCL_NET_GDR_LEVEL={level} is set."
    if able:
        # NCCL's log shows no more; its conditions are in graph/paths.cc, ncclTopoCheckGdr.
        return f"{able[0]} supports it: the GPUs do not, or the path between them and the adapter crosses the CPU."
    if any(nccl.rows[rank].peer_memory for rank in ranks):
        return "nvidia-peermem is loaded, but NCCL finds no adapter that can use it."
    return "Neither nvidia-peermem nor DMA-BUF is available."


def inside(nccl: TransportLog) -> Iterator[Finding]:
    """Paths within a host that leave NVLinks unused, and sockets where nothing but memory lies between."""
    by_host: dict[str, list[Hop]] = defaultdict(list)
    for hop in filter(nccl.is_inside, nccl.hops):
        linked = nccl.are_linked(hop.source, hop.target)
        # SHM between GPUs that only PCIe connects, or NET over their adapters, may well be faster.
        if (linked and hop.kind != "P2P") or (hop.kind == "NET" and hop.name == SOCKET):
            by_host[nccl.seen.world.host_of(hop.source)].append(hop)
    known = len(nccl.seen.world.hosts)
    for host, hops in by_host.items():
        ranks = sorted({rank for hop in hops for rank in (hop.source, hop.target)})
        linked = any(nccl.are_linked(hop.source, hop.target) for hop in hops)
        over = ", ".join(sorted({hop.text for hop in hops}))
        why = nccl.reasons(ranks)
        nodes = next((log.hosts for rank in ranks if (log := nccl.logs.get(rank)) and log.hosts), None)
        apart = f" NCCL counts {nodes} hosts for these ranks; they are on {known}." if nodes and nodes > known else ""
        host_ids = any(finding.code == "LCH002.host-id" for finding in nccl.seen.findings_of("LCH002"))
        see = " See LCH002.host-id." if host_ids else ""
        yield nccl.seen.finding(
            "inside",
            "ranks of one host do not use NVLink" if linked else "ranks of one host communicate over sockets",
            f"{host}: {ranks_text(ranks)} communicate over {over} (rank {hops[0].source} to rank {hops[0].target}), "
            f"although {'NVLinks connect their GPUs' if linked else 'P2P or shared memory is available'}. P2P "
            f"is expected.{apart} {_why(why)}{see}",
            ranks=ranks,
            gpus=[uuid for rank in ranks if rank in nccl.rows and (uuid := nccl.rows[rank].gpu_uuid)],
            evidence={"ways": [f"{hop.source} -> {hop.target} {hop.text}" for hop in hops], "reasons": [*why]},
            fix="Unset NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, NCCL_SHM_DISABLE and NCCL_HOSTID, unless P2P003 of this "
            "report needs them. All containers of a host must share its GPUs, IPC namespace and host name (docker "
            "--gpus all --ipc=host --uts=host).",
        )


def nvls(nccl: TransportLog) -> Iterator[Finding]:
    """NVLink SHARP on some GPUs only: the number of NVLS channels is the least of all ranks (init.cc)."""
    offered = {rank: log.nvls for rank, log in nccl.logs.items() if log.nvls is not None}
    odd = odd_ones_out(offered)
    if odd is None:
        return
    without = tuple(rank for rank, has in offered.items() if not has)
    blamed = without if odd.ranks and odd.usual is True else ()
    yield nccl.seen.finding(
        "nvls",
        "not all GPUs offer NVLS (NVLink SHARP)",
        f"NVLS is not available on {ranks_text(without)} ({names_text(nccl.seen.world.hosts_of(without))}), but is on "
        f"{len(offered) - len(without)} of {len(offered)} ranks. NCCL uses it only if all ranks have it."
        + no_majority(blamed),
        severity=Severity.WARNING if blamed else Severity.NOTE,
        ranks=blamed,
        gpus=[uuid for rank in blamed if (uuid := nccl.rows[rank].gpu_uuid)],
        evidence={"without": [*without]},
        fix="On these hosts run `systemctl status nvidia-fabricmanager` and `nvidia-smi -q | grep -A3 Fabric`; the "
        "fabric manager must run in the driver's version. NCCL_NVLS_ENABLE=0 must not be set.",
    )


def warned(nccl: TransportLog) -> Iterator[Finding]:
    """NCCL's own warnings, by text."""
    tellers: dict[str, list[int]] = defaultdict(list)
    for rank, log in nccl.logs.items():
        for text in log.warnings:
            tellers[text].append(rank)
    if tellers:
        lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in tellers.items()]
        ranks = sorted({rank for own in tellers.values() for rank in own})
        yield nccl.seen.finding(
            "warned",
            "NCCL printed warnings",
            f"NCCL printed warnings although the all-reduces worked: {names_text(lines)}.",
            hosts=nccl.seen.world.hosts_of(ranks),
            evidence={"warnings": [*lines]},
            fix="Give NCCL's output to `ddpdiag explain FILE`, which knows causes of many warnings. 'Got async event' "
            "means a link that goes down and up: have its cable checked.",
            known=known_error(*(f"NCCL WARN {text}" for text in tellers)),
        )


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
    """NCCL's version and network, as the first rank that reports them has it."""
    logs = transport_log(seen).logs.values()
    names = {
        "nccl.version": next((log.version for log in logs if log.version), None),
        "nccl.network": next((log.network for log in logs if log.network), None),
    }
    return {name: value for name, value in names.items() if value is not None}


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
