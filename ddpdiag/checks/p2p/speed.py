"""An all-reduce that is much slower than NCCL's path allows.

NCCL's log (P2P004) shows the path between the ranks, and NVML shows the rate of its links. If the all-reduce of COL001
over nccl stays below `far_ratio` of this rate, it is measured once more, with a larger message: 128 MiB, more for many
ranks, or less if that takes long. If the all-reduce of COL001 is fast enough, nothing more is measured. Short messages
are bound by latency, so the time of a call of 4 bytes is subtracted.

The finding is an error if both measurements agree, NCCL's own log shows the path, and nothing else uses the GPUs or the
cores. Else it is a warning, which states what is missing, or a note if only the first measurement is slow. If NCCL
copies directly between GPUs (P2P) and stays slow, a last measurement with NCCL_P2P_DISABLE=1 shows whether these copies
are the cause. For TCP sockets and gloo no rate is expected, because their speed depends on the hosts' cores.

Findings:

Causes: NCCL variables that limit its channels, GPUs that are slowed down by heat or power, a narrow PCIe link, NVLinks
with errors, an IOMMU or ACS. The finding names those that this run shows, and no other.

Fix: do what the finding recommends.

Confirm by hand: Nccl-tests' `all_reduce_perf -b 4M -e 1G -f 4 -g 1` under the same launcher on an idle host; `ddpdiag
allreduce-bench -e 1G`.

Sources: nccl-tests, doc/PERFORMANCE.md (bus bandwidth); NCCL's src/graph/topo.h and topo.cc (rates of links); Azure's
health checks (github.com/Azure/azurehpc-health-checks); stas00, ml-engineering (80 % of the nominal rate is good).
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.bandwidth import busbw, lowest_bound
from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import SMALL_BYTES, affordable_calls
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu.other_users import not_free_reasons
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.copies.judge import ACS_FIX
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.rates import FAR_BELOW_SHARE, doubts_text, severity_of_rate
from ddpdiag.checks.world import ONE_RANK_REASON, no_gpu_reason
from ddpdiag.model import Finding, Kind, Severity, Trial
from ddpdiag.model.bench import Bottleneck, Limits
from ddpdiag.model.trial import Context
from ddpdiag.nccl_rings import allows_mnnvl
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.nccl_log import Hop
from ddpdiag.stats import Samples, samples
from ddpdiag.text import rate_text, share_of_expected_text, share_text, size_text

FINDINGS = {
    "far-below": FindingSpec(
        "less than `far_ratio` of what the path can do, twice; an error unless the message states why it is a warning, "
        "and a note if the second measurement is fast enough."
    )
}

# Sizes of the second measurement: _REPEAT_BYTES, or more for many ranks, up to _MAX_REPEAT_BYTES.
_REPEAT_BYTES, _REPEAT_BYTES_PER_RANK, _MAX_REPEAT_BYTES = 128 << 20, 128 << 10, 1 << 30
# The most time that one call may take on a slow path.
_MAX_CALL_SECONDS = 0.4
# An all-reduce divides a message into one part per rank. If parts are smaller, calls take longer than their bytes need.
_MIN_PART_BYTES = 64 << 10
# The share of PCIe's rate for data that go through the host's memory (NCCL's SHM), because they cross PCIe twice.
_THROUGH_HOST_SHARE = 0.5
# Variables with which NCCL uses less of the links than it can (NCCL user guide, environment variables).
_VARIABLES = (
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE",
    "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE",
)  # fmt: skip
_CLOCKS = ("GPU005.slowdown", "GPU010.slowdown")
# Codes of findings of other checks that may explain a slow path, by the bottleneck of the path.
_CAUSE_CODES = {
    Bottleneck.NVLINK: ("P2P002.slow", "GPU006", "GPU010.nvlink-down", "GPU010.nvlink-errors", *_CLOCKS),
    Bottleneck.PCIE: ("P2P002.slow", "P2P002.host-slow", "GPU004.narrow", "P2P001.acs", "P2P001.disabled", *_CLOCKS),
    Bottleneck.NIC: ("P2P004.no-gdr", "GPU004.narrow", *_CLOCKS),
}
# With this variable NCCL copies through the host's memory instead of directly between GPUs (P2P).
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}
_NO_P2P = "NCCL_P2P_DISABLE=1"
# Direct copies are the cause if the all-reduce is this many times faster without P2P. Normally it is slower.
_NO_P2P_RATIO = 2.0
_NO_P2P_FIX = (
    f"Run the job with {_NO_P2P} until direct copies are fast. Run `nvidia-smi nvlink -s` there for links that are "
    f"down. {ACS_FIX}"
)
Rows = Mapping[int, transport.Data]
Hosts = Mapping[str, Sequence[int]]


class Data(Struct, frozen=True, kw_only=True):
    """The result of one rank: the seconds of all-reduces of a message of 4 bytes, and of one of `bytes`."""

    backend: str
    bytes: int
    small_seconds: Samples
    large_seconds: Samples


class Path(NamedTuple):
    """NCCL's path: its bottleneck, the bus bandwidth that it should reach, and the origin of this value in words.

    `transports` are names in NCCL's log, such as "P2P/CUMEM". `log_covers_all_ranks`: the log shows every rank's path.
    """

    busbw_bytes_per_s: float
    bottleneck: Bottleneck
    source: str
    transports: str
    log_covers_all_ranks: bool

    @property
    def text(self) -> str:
        """The path in words, such as "95 % of the 371 GB/s of the GPU's NVLinks. NCCL's log shows P2P/CUMEM"."""
        return f"{self.source}. NCCL's log shows {self.transports}" if self.transports else self.source


class AllReduceTime(NamedTuple):
    """The seconds of an all-reduce (the shortest call of the slowest rank), and the latency of a call of 4 bytes."""

    size_bytes: int
    ranks: int
    seconds: float
    latency_seconds: float = 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        return busbw("all_reduce", self.size_bytes, self.seconds, self.ranks)

    def share_of(self, expected_bytes_per_s: float) -> float:
        """The share of the expected rate that is reached once the latency is subtracted. Less is expected of small
        messages. Infinity if no time is left then, or if nothing is expected."""
        transfer_seconds = self.seconds - self.latency_seconds
        expected = expected_bytes_per_s * min(1.0, self.size_bytes / self.ranks / _MIN_PART_BYTES)
        if transfer_seconds <= 0 or expected <= 0:
            return math.inf
        return busbw("all_reduce", self.size_bytes, transfer_seconds, self.ranks) / expected


class Cause(NamedTuple):
    """A fact of this run that makes a path slow, and its fix (empty if there is none)."""

    text: str
    fix: str = ""


def measure(ctx: Context) -> Data:
    from ddpdiag.workloads.collectives import time_all_reduce
    from ddpdiag.workloads.group import process_group

    backend, size = str(ctx.trial.params["backend"]), int(ctx.trial.params["bytes"])
    with process_group(ctx, backend) as device:
        small = time_all_reduce(ctx, SMALL_BYTES, device, (5, 20))
        seconds = time_all_reduce(ctx, size, device, (1, 1))
        calls = affordable_calls(0, 5, max(seconds), ctx.end - time.monotonic())
        seconds += time_all_reduce(ctx, size, device, calls)
    return Data(backend=backend, bytes=size, small_seconds=samples(small), large_seconds=samples(seconds))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Measure again if COL001's all-reduce is far too slow for its path. If it still is, measure once without P2P."""
    first, path, ratio = first_measurement(seen), path_of_world(seen), seen.setting("far_ratio")
    if first is None or isinstance(path, str) or len(seen.world.living_ranks) < seen.world.size:
        return ()
    env: dict[str, str | None] = {}
    if seen.trials:
        second = repeated_measurement(seen)
        if second is None or second.share_of(path.busbw_bytes_per_s) >= ratio:
            return ()
        if any(trial.env for trial in seen.trials) or "P2P" not in path.transports:
            return ()
        env = {**WITHOUT_P2P}
    elif first.share_of(path.busbw_bytes_per_s) >= ratio:
        return ()
    # As many bytes as the slow path moves in `_MAX_CALL_SECONDS`, but no fewer than in COL001.
    max_bytes = min(max(_REPEAT_BYTES, _REPEAT_BYTES_PER_RANK * first.ranks), _MAX_REPEAT_BYTES)
    size = max(first.size_bytes, min(max_bytes, int(_MAX_CALL_SECONDS * first.size_bytes / first.seconds) & ~0xFFFF))
    params: dict[str, str | int | float | bool] = {"backend": seen.world.backend, "bytes": size}
    return (new_trial(seen, params=params, env=env, fresh=bool(env), may_fail=bool(env)),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip unless NCCL's path has a known rate, and COL001's all-reduce is far below it."""
    if seen.world.size == 1:
        return inapplicable(ONE_RANK_REASON)
    if seen.world.backend != "nccl":
        return inapplicable(f"the backend is {seen.world.backend}; what its path can do is not known")
    return (
        inapplicable(no_gpu_reason(seen.world))
        or fallback.skip_failing_backend(seen)
        or unneeded(None if seen.trials or plan(seen) else _why_not_again(seen))
    )


def _why_not_again(seen: Seen[Data]) -> str:
    first, path = first_measurement(seen), path_of_world(seen)
    if first is None:
        return f"no all-reduce over {seen.world.backend} was timed (COL001)"
    if isinstance(path, str):
        return path
    rate = first.busbw_bytes_per_s
    reached = f"{rate_text(rate)} busbw at {size_text(first.size_bytes)}"
    return f"the all-reduce of COL001 reached {reached}, {share_of_expected_text(rate, path.busbw_bytes_per_s)}"


def first_measurement(seen: Seen[Data]) -> AllReduceTime | None:
    """The time of COL001's all-reduce over the job's backend; None if a rank has no result or a wrong sum."""
    rows = {
        row.place.rank: row.data for row in seen.of(all_reduce.CHECK).rows if row.data.backend == seen.world.backend
    }
    if len(rows) < seen.world.size or any(row.wrong for row in rows.values()):
        return None
    return _time_of_slowest_rank(
        {rank: (row.large_bytes, row.large_seconds, row.small_seconds) for rank, row in rows.items()}
    )


def repeated_measurement(seen: Seen[Data], env: Mapping[str, str] | None = None) -> AllReduceTime | None:
    """The time of the second measurement, or of that with the variables `env`; None if a rank has no result."""
    rows = {row.place.rank: row.data for row in seen.rows if row.trial.env == (env or {})}
    if len(rows) < seen.world.size:
        return None
    return _time_of_slowest_rank(
        {rank: (row.bytes, row.large_seconds, row.small_seconds) for rank, row in rows.items()}
    )


def _time_of_slowest_rank(rows: Mapping[int, tuple[int, Samples, Samples]]) -> AllReduceTime:
    """The shortest call of the slowest rank, because noise only adds time. `rows` has for each rank the bytes of the
    large message, the seconds of its calls, and those of calls of 4 bytes."""
    return AllReduceTime(
        size_bytes=max(size for size, _, _ in rows.values()),
        ranks=len(rows),
        seconds=max(large.min for _, large, _ in rows.values()),
        latency_seconds=min(small.min for _, _, small in rows.values()),
    )


def path_of_world(seen: Seen[Data]) -> Path | str:
    """NCCL's path between all ranks of this run, or the reason why the path's rate is not known."""
    if fallback.job_workarounds(seen):
        return "NCCL takes another path with the variables of P2P003"
    names_are_unique = len({name for name, _ in seen.world.hosts}) == len(seen.world.hosts)
    hosts = {name if names_are_unique else f"{name} {boot}": ranks for (name, boot), ranks in seen.world.hosts.items()}
    return path_of_ranks(seen.of(transport.CHECK).by_rank, hosts)


def path_of_ranks(rows: Rows, hosts: Hosts) -> Path | str:
    """NCCL's path between the ranks of these hosts, or the reason why the path's rate is not known."""
    ranks = [rank for host_ranks in hosts.values() for rank in host_ranks]
    if missing := [rank for rank in ranks if rank not in rows]:
        return f"the links of {ranks_text(missing)} are not known"
    host_of = {rank: host for host, host_ranks in hosts.items() for rank in host_ranks}
    hops = {(hop.source, hop.target, hop.text): hop for rank in ranks for hop in rows[rank].hops}.values()
    inside = [hop for hop in hops if host_of.get(hop.source) == host_of.get(hop.target)]
    limits = _limits(rows, hosts, [hop for hop in hops if hop not in inside], inside)
    if isinstance(limits, str):
        return limits
    limit = lowest_bound("all_reduce", "nccl", hosts, limits)
    if limit is None:
        return "what the links between these GPUs should reach is not known"
    crosses_pcie_twice = limit.bottleneck is Bottleneck.PCIE and any(hop.kind == "SHM" for hop in inside)
    return Path(
        busbw_bytes_per_s=limit.busbw_bytes_per_s * (_THROUGH_HOST_SHARE if crosses_pcie_twice else 1.0),
        bottleneck=limit.bottleneck,
        source=f"{limit.source}{', half of it through the memory of the host' if crosses_pcie_twice else ''}",
        transports=names_text(sorted({hop.text for hop in hops}), 4),
        log_covers_all_ranks={end for hop in hops for end in (hop.source, hop.target)}.issuperset(ranks),
    )


def _limits(rows: Rows, hosts: Hosts, outside: Sequence[Hop], inside: Sequence[Hop]) -> dict[int, Limits] | str:
    """The rates of the links that NCCL uses, by rank, or the reason why they are not known.

    `outside` and `inside` are the paths between hosts and inside a host. A network card's nominal speed is used for
    InfiniBand and RoCE only, because the speed of TCP depends on the hosts' cores.
    """
    if any(hop.kind == "NET" for hop in inside):
        return "NCCL uses the network inside a host"
    # P2P between hosts is MNNVL (transport/p2p.cc).
    network_hops = [hop for hop in outside if hop.kind != "P2P"]
    if any(hop.name == transport.SOCKET for hop in network_hops):
        return "NCCL sends over TCP sockets, for which no rate is expected"
    if len(hosts) > 1 and not all(hop.name.startswith("IB") for hop in network_hops):
        return f"what {names_text(sorted({hop.text for hop in network_hops}), 4)} can carry is not known"
    domains = _nvlink_domains(rows, hosts, network_hops)
    over_nvlink = len(hosts) > 1 and None not in domains.values() and len({*domains.values()}) == 1
    through_host = any(hop.kind == "SHM" for hop in inside)
    limits: dict[int, Limits] = {}
    for host, host_ranks in hosts.items():
        network = _network_limits(host_ranks, rows) if len(hosts) > 1 and not over_nvlink else Limits()
        if network is None:
            return f"which network ports of {host} NCCL uses is not known"
        for rank in host_ranks:
            links = rows[rank].links
            used = Connections(pcie_bytes_per_s=links.pcie_bytes_per_s) if through_host else links
            limits[rank] = structs.replace(network, **structs.asdict(used) | {"nvlink_domain": domains[rank]})
    return limits


def _nvlink_domains(rows: Rows, hosts: Hosts, network_hops: Sequence[Hop]) -> dict[int, str | None]:
    """NVML's NVLink domain of each rank, or None for all ranks if NCCL uses no NVLinks between hosts.

    NCCL does not use them if variables forbid it, or if its log shows network paths between ranks of one domain.
    """
    logs = [row.log for row in rows.values() if row.log is not None]
    domains = {rank: rows[rank].links.nvlink_domain for host_ranks in hosts.values() for rank in host_ranks}
    is_unused = any(domains.get(hop.source) == domains.get(hop.target) for hop in network_hops)
    if is_unused or not all(allows_mnnvl(log.settings) for log in logs):
        return dict.fromkeys(domains)
    return domains


def _network_limits(ranks: Sequence[int], rows: Rows) -> Limits | None:
    """The number and total rate of the RDMA ports that NCCL's log shows on a host; None if they are not known."""
    devices = {device for rank in ranks for hop in rows[rank].hops if hop.kind == "NET" for device in hop.devices}
    ports = rows[ranks[0]].usable_ports
    rates = [port.bytes_per_s for port in ports if port.bytes_per_s]
    number = min(len(devices), len(rates))
    if not number or len(rates) < len(ports):
        return None
    rate = min(rates)
    return Limits(nic=f"{number} ports", nic_bytes_per_s=number * rate, nic_ports=number, nic_port_bytes_per_s=rate)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    first, path, ratio = first_measurement(seen), path_of_world(seen), seen.setting("far_ratio")
    if first is None or isinstance(path, str):
        return
    second, expected = repeated_measurement(seen), path.busbw_bytes_per_s
    shares = [measured.share_of(expected) for measured in (first, second) if measured is not None]
    doubts = [*_doubts(seen, path, second)] if shares[0] < ratio else []
    severity = severity_of_rate(shares, min_share=ratio, error_below=ratio, doubts=doubts)
    if severity is None:
        return
    is_note = severity is Severity.NOTE
    causes = [] if is_note else [*_causes(seen, path)]
    latest = second or first
    hosts = seen.world.host_names(seen.world.living_ranks) if len(seen.world.hosts) == 1 else ()
    where = f" on {hosts[0]}" if hosts else ""
    rate, backend = latest.busbw_bytes_per_s, seen.world.backend
    first_text = f" ({rate_text(first.busbw_bytes_per_s)} at {size_text(first.size_bytes)})" if second else ""
    cause_text = f" Seen in this run: {'; '.join(c.text for c in causes)}." if causes else " This run shows no cause."
    yield seen.finding(
        "far-below",
        f"one of two measurements of the all-reduce over {backend} was slow: {rate_text(first.busbw_bytes_per_s)}"
        if is_note
        else f"the all-reduce over {backend} is far too slow for its path: {rate_text(rate)}",
        f"The all-reduce over {backend}{where} reaches {rate_text(rate)} busbw at {size_text(latest.size_bytes)}"
        f"{first_text}. At least {share_text(ratio)} of {rate_text(expected)} is expected: {path.text}."
        f"{'' if is_note else cause_text}{'' if is_note else doubts_text(doubts)}",
        severity=severity,
        hosts=() if is_note else hosts,
        evidence={
            "busbw_bytes_per_s": rate,
            "first_busbw_bytes_per_s": first.busbw_bytes_per_s,
            "expected_bytes_per_s": expected,
            "source": path.source,
            "transports": path.transports,
            "causes": [cause.text for cause in causes],
            "doubts": [*doubts],
        },
        fix="Nothing to do." if is_note else next((cause.fix for cause in causes if cause.fix), _compare_fix(seen)),
    )


def _compare_fix(seen: Seen[Data]) -> str:
    (name, _), ranks = next(iter(seen.world.hosts.items()))
    return (
        f"Run nccl-tests' `all_reduce_perf -b 4M -e 1G -f 4 -g {len(ranks)}` on {name} while nothing else runs there. "
        "If it is slow too, compare `nvidia-smi topo -m` and `nvidia-smi -q -d PERFORMANCE,PCIE` with a host that "
        "passes; if it is fast, compare the versions of NCCL and the NCCL_* variables."
    )


def _doubts(seen: Seen[Data], path: Path, second: AllReduceTime | None) -> Iterator[str]:
    """The reasons why the finding is a warning and not an error."""
    if not path.log_covers_all_ranks:
        yield "NCCL's log does not show the path"
    if second is None:
        yield "it was measured once only"
    if (ranks_per_core := seen.world.ranks_per_core) > 1:
        yield f"{ranks_per_core:.1f} ranks share each core"
    yield from not_free_reasons(seen, _uuids(seen))


def _uuids(seen: Seen[Data]) -> list[str]:
    rows = seen.of(transport.CHECK).by_rank
    return [row.gpu_uuid or f"the GPU of rank {rank}" for rank, row in rows.items()]


def _causes(seen: Seen[Data], path: Path) -> Iterator[Cause]:
    """The causes that this run shows, the likeliest first."""
    second, no_p2p = repeated_measurement(seen), repeated_measurement(seen, WITHOUT_P2P)
    if second and no_p2p and no_p2p.busbw_bytes_per_s > _NO_P2P_RATIO * second.busbw_bytes_per_s:
        yield Cause(f"with {_NO_P2P} the same all-reduce reaches {rate_text(no_p2p.busbw_bytes_per_s)}", _NO_P2P_FIX)
    logs = [row.log for row in seen.of(transport.CHECK).by_rank.values() if row.log is not None]
    limits = dict.fromkeys((name, log.settings[name]) for log in logs for name in _VARIABLES if name in log.settings)
    if limits:
        names = ", ".join(sorted({name for name, _ in limits}))
        yield Cause(f"{', '.join(map('='.join, limits))} limits NCCL", f"Unset {names} and run again.")
    uuids, codes = {*_uuids(seen)}, _CAUSE_CODES.get(path.bottleneck, ())
    found: dict[str, Finding] = {}
    for finding in chain.from_iterable(map(seen.findings_of, dict.fromkeys(code.partition(".")[0] for code in codes))):
        is_about_these_gpus = not finding.gpus or uuids & {*finding.gpus}
        if finding.severity is not Severity.NOTE and is_about_these_gpus and finding.code.startswith(codes):
            found.setdefault(finding.code, finding)
    for finding in found.values():
        yield Cause(f"{finding.title} ({finding.code})", finding.fix)


SETTINGS = {"far_ratio": FAR_BELOW_SHARE}
# The deadline covers a new context and communicator, and 7 calls of 0.4 s at most over a slow path.
CHECK: Check[Data] = Check(__name__, "P2P005", "all-reduce-speed", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=20)
