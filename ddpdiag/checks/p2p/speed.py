"""All-reduce far below what its path can do.

NCCL's log (P2P004) shows the path between the ranks, and NVML what its links carry. Where the all-reduce of COL001 over
nccl stays below `far_ratio` of that, it is measured once more, with a larger message (128 MiB, less
where that takes long). A run whose all-reduce is fast enough measures nothing more. Short messages are bound by
latency, so the time of a call of 4 bytes is left out.

It is an error where both measurements agree, NCCL's own log shows the path, and nothing else uses the GPUs or the
cores; else a warning, which states what is missing. Where the second measurement is fast enough, the first is a note.
Where NCCL copies directly between GPUs (P2P) and stays slow, a last measurement with NCCL_P2P_DISABLE=1 shows whether
direct copies are the cause. For TCP sockets and for gloo no rate is expected: their speed depends on the hosts' cores.

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

from ddpdiag.bandwidth import bound, busbw
from ddpdiag.checks.api import Check, Scope, Seen, SkipReason, Stage, inapplicable, new_trial, unneeded
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.collective.all_reduce import SMALL_BYTES, affordable
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.gpu.other_users import not_free
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p import transport
from ddpdiag.checks.p2p.copies.judge import ACS
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.checks.rates import FAR_RATIO, doubts_text, severity_of_rate
from ddpdiag.checks.world import ONE_RANK, without_gpu
from ddpdiag.model import Finding, Kind, Severity, Trial
from ddpdiag.model.bench import Bottleneck, Limits
from ddpdiag.model.trial import Context
from ddpdiag.nccl_rings import allows_mnnvl
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.nccl_log import Hop
from ddpdiag.stats import Samples, samples
from ddpdiag.text import rate_text, reached_text, share_text, size_text

FINDINGS = {
    "far-below": FindingSpec(
        "less than `far_ratio` of what the path can do, twice; an error unless the message states why it is a warning, "
        "and a note if the second measurement is fast enough."
    )
}

# Sizes of the second measurement, large enough for the rate of any link, also if many ranks share it.
_BYTES, _BYTES_PER_RANK, _MOST_BYTES = 128 << 20, 128 << 10, 1 << 30
# The most that one call may take on a slow path.
_CALL_SECONDS = 0.4
# If the part of a rank is smaller, calls take longer than their bytes need (bench.bottleneck, on every fabric).
_LEAST_PART_BYTES = 64 << 10
# Data that go through the host's memory cross PCIe twice (NCCL's SHM).
_THROUGH_HOST_SHARE = 0.5
# Variables that let NCCL use less of the links than it can (NCCL user guide, environment variables).
_LIMITING = (
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE",
    "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE",
)  # fmt: skip
_CLOCKS = ("GPU005.slowdown", "GPU010.slowdown")
# Findings of other checks that may explain a slow path, by the part that limits its rate.
_SEEN_BY = {
    Bottleneck.NVLINK: ("P2P002.slow", "GPU006", "GPU010.nvlink-down", "GPU010.nvlink-errors", *_CLOCKS),
    Bottleneck.PCIE: ("P2P002.slow", "P2P002.host-slow", "GPU004.narrow", "P2P001.acs", "P2P001.disabled", *_CLOCKS),
    Bottleneck.NIC: ("P2P004.no-gdr", "GPU004.narrow", *_CLOCKS),
}
# With this variable NCCL copies through the host's memory.
AROUND = {"NCCL_P2P_DISABLE": "1"}
_ASSIGNED = "NCCL_P2P_DISABLE=1"
# Direct copies are the cause if the all-reduce is this many times faster without them (normally it is slower).
_AROUND_RATIO = 2.0
_GO_AROUND = (
    f"Run the job with {_ASSIGNED} until direct copies are fast. Run `nvidia-smi nvlink -s` there for links that are "
    f"down. {ACS}"
)


Rows = Mapping[int, transport.Data]
Hosts = Mapping[str, Sequence[int]]


class Data(Struct, frozen=True, kw_only=True):
    """The answer of one rank: seconds of all-reduces of 4 bytes and of `bytes`."""

    backend: str
    bytes: int
    small_seconds: Samples
    large_seconds: Samples


class Path(NamedTuple):
    """The bus bandwidth that NCCL's path should reach, the part that limits it, and its derivation in words (`source`).

    `transports` are names in NCCL's log, such as "P2P/CUMEM". `by_log`: the log shows a path of every rank.
    """

    busbw_bytes_per_s: float
    part: Bottleneck
    source: str
    transports: str
    by_log: bool

    @property
    def text(self) -> str:
        """The path in words, such as "95 % of the 371 GB/s of the GPU's NVLinks. NCCL's log shows P2P/CUMEM"."""
        return f"{self.source}. NCCL's log shows {self.transports}" if self.transports else self.source


class Timed(NamedTuple):
    """The result of an all-reduce: seconds of the slowest rank's shortest call, and of a call of a few bytes."""

    size_bytes: int
    ranks: int
    seconds: float
    latency_seconds: float = 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth by nccl-tests' formula."""
        return busbw("all_reduce", self.size_bytes, self.seconds, self.ranks)

    def share_of(self, expected_bytes_per_s: float) -> float:
        """The reached share of the rate expected at this size, without the latency; infinity if no time is left."""
        moving = self.seconds - self.latency_seconds
        expected = expected_bytes_per_s * min(1.0, self.size_bytes / self.ranks / _LEAST_PART_BYTES)
        if moving <= 0 or expected <= 0:
            return math.inf
        return busbw("all_reduce", self.size_bytes, moving, self.ranks) / expected


class Cause(NamedTuple):
    """A fact of this run that makes a path slow, and the fix (empty: none)."""

    text: str
    fix: str = ""


def measure(ctx: Context) -> Data:
    """Time small and large all-reduces."""
    from ddpdiag.workloads.collectives import time_all_reduce
    from ddpdiag.workloads.group import process_group

    backend, size = str(ctx.trial.params["backend"]), int(ctx.trial.params["bytes"])
    with process_group(ctx, backend) as device:
        small = time_all_reduce(ctx, SMALL_BYTES, device, (5, 20))
        seconds = time_all_reduce(ctx, size, device, (1, 1))
        calls = affordable(0, 5, max(seconds), ctx.end - time.monotonic())
        seconds += time_all_reduce(ctx, size, device, calls)
    return Data(backend=backend, bytes=size, small_seconds=samples(small), large_seconds=samples(seconds))


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Measure again if COL001's all-reduce is far too slow for its path; if it still is, once without direct copies."""
    first, path, ratio = first_of(seen), path_here(seen), seen.number("far_ratio")
    if first is None or isinstance(path, str) or len(seen.world.living) < seen.world.size:
        return ()
    env: dict[str, str | None] = {}
    if seen.trials:
        again = again_of(seen)
        if again is None or again.share_of(path.busbw_bytes_per_s) >= ratio:
            return ()
        if any(trial.env for trial in seen.trials) or "P2P" not in path.transports:
            return ()
        env = {**AROUND}
    elif first.share_of(path.busbw_bytes_per_s) >= ratio:
        return ()
    # As many bytes as the slow path moves in `_CALL_SECONDS`, but no fewer than before.
    most = min(max(_BYTES, _BYTES_PER_RANK * first.ranks), _MOST_BYTES)
    size = max(first.size_bytes, min(most, int(_CALL_SECONDS * first.size_bytes / first.seconds) & ~0xFFFF))
    params: dict[str, str | int | float | bool] = {"backend": seen.world.backend, "bytes": size}
    return (new_trial(seen, params=params, env=env, fresh=bool(env), may_fail=bool(env)),)


def skip(seen: Seen[Data]) -> SkipReason | None:
    """Skip unless NCCL's path has a known rate, and COL001's all-reduce is far below it."""
    if seen.world.size == 1:
        return inapplicable(ONE_RANK)
    if seen.world.backend != "nccl":
        return inapplicable(f"the backend is {seen.world.backend}; what its path can do is not known")
    return (
        inapplicable(without_gpu(seen.world))
        or fallback.blocks(seen)
        or unneeded(None if seen.trials or plan(seen) else _why_not(seen))
    )


def _why_not(seen: Seen[Data]) -> str:
    """The reason why the all-reduce is not measured again."""
    first, path = first_of(seen), path_here(seen)
    if first is None:
        return f"no all-reduce over {seen.world.backend} was timed (COL001)"
    if isinstance(path, str):
        return path
    rate = first.busbw_bytes_per_s
    reached = f"{rate_text(rate)} busbw at {size_text(first.size_bytes)}"
    return f"the all-reduce of COL001 reached {reached}, {reached_text(rate, path.busbw_bytes_per_s)}"


def first_of(seen: Seen[Data]) -> Timed | None:
    """COL001's all-reduce over the job's backend; None if a rank has no result or a wrong one."""
    rows = {
        row.place.rank: row.data for row in seen.of(all_reduce.CHECK).rows if row.data.backend == seen.world.backend
    }
    if len(rows) < seen.world.size or any(row.wrong for row in rows.values()):
        return None
    return _timed({rank: (row.large_bytes, row.large_seconds, row.small_seconds) for rank, row in rows.items()})


def again_of(seen: Seen[Data], env: Mapping[str, str] | None = None) -> Timed | None:
    """The second measurement, or with `env` the one with these variables; None if a rank has no result."""
    rows = {row.place.rank: row.data for row in seen.rows if row.trial.env == (env or {})}
    if len(rows) < seen.world.size:
        return None
    return _timed({rank: (row.bytes, row.large_seconds, row.small_seconds) for rank, row in rows.items()})


def _timed(rows: Mapping[int, tuple[int, Samples, Samples]]) -> Timed:
    """The result over all ranks: the shortest call, since noise only adds time, of the slowest rank."""
    return Timed(
        size_bytes=max(size for size, _, _ in rows.values()),
        ranks=len(rows),
        seconds=max(large.min for _, large, _ in rows.values()),
        latency_seconds=min(small.min for _, _, small in rows.values()),
    )


def path_here(seen: Seen[Data]) -> Path | str:
    """The rate that NCCL's path between all ranks should reach, or the reason why it is not known."""
    if fallback.job_workarounds(seen):
        return "NCCL takes another path with the variables of P2P003"
    unique = len({name for name, _ in seen.world.hosts}) == len(seen.world.hosts)
    hosts = {name if unique else f"{name} {boot}": ranks for (name, boot), ranks in seen.world.hosts.items()}
    return path_of(seen.of(transport.CHECK).by_rank, hosts)


def path_of(rows: Rows, hosts: Hosts) -> Path | str:
    """The rate that the path of these ranks should reach, or the reason why it is not known."""
    ranks = [rank for host_ranks in hosts.values() for rank in host_ranks]
    if missing := [rank for rank in ranks if rank not in rows]:
        return f"the links of {ranks_text(missing)} are not known"
    host_of = {rank: host for host, host_ranks in hosts.items() for rank in host_ranks}
    hops = {(hop.source, hop.target, hop.text): hop for rank in ranks for hop in rows[rank].hops}.values()
    inside = [hop for hop in hops if host_of.get(hop.source) == host_of.get(hop.target)]
    limits = _limits(rows, hosts, [hop for hop in hops if hop not in inside], inside)
    if isinstance(limits, str):
        return limits
    lowest = bound("all_reduce", "nccl", hosts, limits)
    if lowest is None:
        return "what the links between these GPUs should reach is not known"
    halved = lowest.part is Bottleneck.PCIE and any(hop.kind == "SHM" for hop in inside)
    return Path(
        busbw_bytes_per_s=lowest.busbw_bytes_per_s * (_THROUGH_HOST_SHARE if halved else 1.0),
        part=lowest.part,
        source=f"{lowest.source}{', half of it through the memory of the host' if halved else ''}",
        transports=names_text(sorted({hop.text for hop in hops}), 4),
        by_log={end for hop in hops for end in (hop.source, hop.target)}.issuperset(ranks),
    )


def _limits(rows: Rows, hosts: Hosts, outside: Sequence[Hop], inside: Sequence[Hop]) -> dict[int, Limits] | str:
    """The rates of the links of each rank that NCCL uses, or the reason why they are not known.

    A network card's nominal speed counts for InfiniBand and RoCE only: TCP reaches what its hosts' cores can copy.
    """
    if any(hop.kind == "NET" for hop in inside):
        return "NCCL uses the network inside a host"
    # P2P between hosts is MNNVL (transport/p2p.cc).
    crossing = [hop for hop in outside if hop.kind != "P2P"]
    if any(hop.name == transport.SOCKET for hop in crossing):
        return "NCCL sends over TCP sockets, for which no rate is expected"
    if len(hosts) > 1 and not all(hop.name.startswith("IB") for hop in crossing):
        return f"what {names_text(sorted({hop.text for hop in crossing}), 4)} can carry is not known"
    domains = _nvlink_domains(rows, hosts, crossing)
    over_nvlink = len(hosts) > 1 and None not in domains.values() and len({*domains.values()}) == 1
    through_host = any(hop.kind == "SHM" for hop in inside)
    limits: dict[int, Limits] = {}
    for host, host_ranks in hosts.items():
        rail = _rails(host_ranks, rows) if len(hosts) > 1 and not over_nvlink else Limits()
        if rail is None:
            return f"which network ports of {host} NCCL uses is not known"
        for rank in host_ranks:
            links = rows[rank].links
            used = Connections(pcie_bytes_per_s=links.pcie_bytes_per_s) if through_host else links
            limits[rank] = structs.replace(rail, **structs.asdict(used) | {"nvlink_domain": domains[rank]})
    return limits


def _nvlink_domains(rows: Rows, hosts: Hosts, crossing: Sequence[Hop]) -> dict[int, str | None]:
    """The NVLink domain of each rank, by NVML; None for all ranks if NCCL uses no NVLinks between hosts.

    NCCL uses none if variables forbid them, or if its log shows network paths between ranks of one domain.
    """
    logs = [row.log for row in rows.values() if row.log is not None]
    domains = {rank: rows[rank].links.nvlink_domain for host_ranks in hosts.values() for rank in host_ranks}
    unused = any(domains.get(hop.source) == domains.get(hop.target) for hop in crossing)
    if unused or not all(allows_mnnvl(log.settings) for log in logs):
        return dict.fromkeys(domains)
    return domains


def _rails(ranks: Sequence[int], rows: Rows) -> Limits | None:
    """The RDMA ports that NCCL's log shows on a host, with their rate; None if it is not known."""
    devices = {device for rank in ranks for hop in rows[rank].hops if hop.kind == "NET" for device in hop.devices}
    ports = rows[ranks[0]].usable_ports
    rates = [port.bytes_per_s for port in ports if port.bytes_per_s]
    number = min(len(devices), len(rates))
    if not number or len(rates) < len(ports):
        return None
    rate = min(rates)
    return Limits(nic=f"{number} ports", nic_bytes_per_s=number * rate, nic_ports=number, nic_port_bytes_per_s=rate)


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    first, path, ratio = first_of(seen), path_here(seen), seen.number("far_ratio")
    if first is None or isinstance(path, str):
        return
    again, expected = again_of(seen), path.busbw_bytes_per_s
    shares = [one.share_of(expected) for one in (first, again) if one is not None]
    doubts = [*_doubts(seen, path, again)] if shares[0] < ratio else []
    severity = severity_of_rate(shares, least=ratio, error_below=ratio, doubts=doubts)
    if severity is None:
        return
    is_note = severity is Severity.NOTE
    causes = [] if is_note else [*_causes(seen, path)]
    shown = again or first
    nodes = seen.world.hosts_of(seen.world.living) if len(seen.world.hosts) == 1 else ()
    where = f" on {nodes[0]}" if nodes else ""
    rate, backend = shown.busbw_bytes_per_s, seen.world.backend
    both = f" ({rate_text(first.busbw_bytes_per_s)} at {size_text(first.size_bytes)})" if again else ""
    why = f" Seen in this run: {'; '.join(own.text for own in causes)}." if causes else " This run shows no cause."
    yield seen.finding(
        "far-below",
        f"one of two measurements of the all-reduce over {backend} was slow: {rate_text(first.busbw_bytes_per_s)}"
        if is_note
        else f"the all-reduce over {backend} is far too slow for its path: {rate_text(rate)}",
        f"The all-reduce over {backend}{where} reaches {rate_text(rate)} busbw at {size_text(shown.size_bytes)}{both}. "
        f"At least {share_text(ratio)} of {rate_text(expected)} is expected: {path.text}."
        f"{'' if is_note else why}{'' if is_note else doubts_text(doubts)}",
        severity=severity,
        hosts=() if is_note else nodes,
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
    """The fix if no cause is known: the same measurement by nccl-tests on the first host."""
    (name, _), ranks = next(iter(seen.world.hosts.items()))
    return (
        f"Run nccl-tests' `all_reduce_perf -b 4M -e 1G -f 4 -g {len(ranks)}` on {name} while nothing else runs there. "
        "If it is slow too, compare `nvidia-smi topo -m` and `nvidia-smi -q -d PERFORMANCE,PCIE` with a host that "
        "passes; if it is fast, compare the versions of NCCL and the NCCL_* variables."
    )


def _doubts(seen: Seen[Data], path: Path, again: Timed | None) -> Iterator[str]:
    """Reasons for a warning instead of an error."""
    if not path.by_log:
        yield "NCCL's log does not show the path"
    if again is None:
        yield "it was measured once only"
    if (crowd := seen.world.ranks_per_core) > 1:
        yield f"{crowd:.1f} ranks share each core"
    yield from not_free(seen, _uuids(seen))


def _uuids(seen: Seen[Data]) -> list[str]:
    rows = seen.of(transport.CHECK).by_rank
    return [row.gpu_uuid or f"the GPU of rank {rank}" for rank, row in rows.items()]


def _causes(seen: Seen[Data], path: Path) -> Iterator[Cause]:
    """The causes that this run shows, the likeliest first."""
    again, around = again_of(seen), again_of(seen, AROUND)
    if again and around and around.busbw_bytes_per_s > _AROUND_RATIO * again.busbw_bytes_per_s:
        yield Cause(f"with {_ASSIGNED} the same all-reduce reaches {rate_text(around.busbw_bytes_per_s)}", _GO_AROUND)
    logs = [row.log for row in seen.of(transport.CHECK).by_rank.values() if row.log is not None]
    given = dict.fromkeys((name, log.settings[name]) for log in logs for name in _LIMITING if name in log.settings)
    if given:
        names = ", ".join(sorted({name for name, _ in given}))
        yield Cause(f"{', '.join(map('='.join, given))} limits NCCL", f"Unset {names} and run again.")
    uuids, codes = {*_uuids(seen)}, _SEEN_BY.get(path.part, ())
    found: dict[str, Finding] = {}
    for finding in chain.from_iterable(map(seen.findings_of, dict.fromkeys(code.partition(".")[0] for code in codes))):
        concerns = not finding.gpus or uuids & {*finding.gpus}
        if finding.severity is not Severity.NOTE and concerns and finding.code.startswith(codes):
            found.setdefault(finding.code, finding)
    for finding in found.values():
        yield Cause(f"{finding.title} ({finding.code})", finding.fix)


SETTINGS = {"far_ratio": FAR_RATIO}
# The deadline covers a new context and communicator, and 7 calls of 0.4 s at most over a slow path.
CHECK: Check[Data] = Check(__name__, "P2P005", "all-reduce-speed", Stage.P2P, Scope.WORLD, Kind.TORCH, deadline=20)
