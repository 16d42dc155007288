"""The rate that NCCL's path should reach, by its own log and by the links that NVML shows; and rates far below it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from ddpdiag.bandwidth import bound, busbw
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.p2p.transport import SOCKET, Data
from ddpdiag.model.bench import Bottleneck, Limits
from ddpdiag.nccl_rings import allows_mnnvl
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.nccl_log import Hop

# AzNHC fails a host below 76 to 87 % of its rates, and 80 % is called good (stas00, ml-engineering). A tenth is far
# from both; it is what a wrong network costs (NCCL over TCP sockets instead of InfiniBand is 5 to 20 times slower).
FAR_RATIO = 0.1
# Variables that let NCCL use less of the links than it can (NCCL user guide, environment variables).
_LIMITING = (
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE",
    "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE",
)  # fmt: skip
# A message that gives each rank less costs its calls more than its bytes (bench.bottleneck, on every fabric).
_LEAST_PART_BYTES = 64 << 10
# What goes through the host's memory crosses PCIe twice (NCCL's SHM).
_THROUGH_HOST_SHARE = 0.5

Rows = Mapping[int, Data]
Hosts = Mapping[str, Sequence[int]]


class Path(NamedTuple):
    """A bus bandwidth that NCCL's path should reach, what sets it, and in words.

    `transports` are those of NCCL's log, such as "P2P/CUMEM"; `by_log` says whether the log shows them for all ranks.
    """

    busbw_bytes_per_s: float
    part: Bottleneck
    source: str
    transports: str
    by_log: bool

    @property
    def text(self) -> str:
        """Such as "95 % of the 371 GB/s of the GPU's NVLinks. NCCL's log shows P2P/CUMEM"."""
        return f"{self.source}. NCCL's log shows {self.transports}" if self.transports else self.source


class Timed(NamedTuple):
    """A collective as it was measured: the shortest call of the slowest rank, and that of a few bytes."""

    collective: str
    size_bytes: int
    ranks: int
    seconds: float
    latency_seconds: float = 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """As nccl-tests counts it."""
        return busbw(self.collective, self.size_bytes, self.seconds, self.ranks)

    def is_far_below(self, expected_bytes_per_s: float, far_ratio: float) -> bool:
        """Whether it is below that share of what is expected."""
        return self.share_of(expected_bytes_per_s) < far_ratio

    def share_of(self, expected_bytes_per_s: float) -> float:
        """The share of what is expected of a message of this size, without the time that a call takes at any size."""
        moving = self.seconds - self.latency_seconds
        if moving <= 0:
            return math.inf
        expected = expected_bytes_per_s * min(1.0, self.size_bytes / self.ranks / _LEAST_PART_BYTES)
        rate = busbw(self.collective, self.size_bytes, moving, self.ranks)
        return rate / expected if expected > 0 else math.inf


class Cause(NamedTuple):
    """A fact of this run that makes a path slow, and the fix (empty: none)."""

    text: str
    fix: str = ""


def doubts_of(path: Path, again: Timed | None, far_ratio: float) -> Iterator[str]:
    """Reasons for a warning instead of an error: a path that is only assumed, a rate that was not measured twice."""
    if not path.by_log:
        yield "NCCL's log does not show the path"
    if again is None:
        yield "it was measured once only"
    elif not again.is_far_below(path.busbw_bytes_per_s, far_ratio):
        yield "the second measurement does not agree with the first"


def causes_text(causes: Sequence[Cause]) -> str:
    """The causes that this run shows, as a sentence."""
    return f"Seen in this run: {'; '.join(cause.text for cause in causes)}." if causes else "This run shows no cause."


def compare_fix(hosts: Mapping[Any, Sequence[int]]) -> str:
    """The fix where no cause is known: the same measurement by nccl-tests on the first of these hosts."""
    (name, _), ranks = next(iter(hosts.items()))
    return (
        f"Run nccl-tests' `all_reduce_perf -b 4M -e 1G -f 4 -g {len(ranks)}` on {name} while nothing else runs there. "
        "If it is slow too, compare `nvidia-smi topo -m` and `nvidia-smi -q -d PERFORMANCE,PCIE` with a host that "
        "passes; if it is fast, compare the versions of NCCL and the NCCL_* variables."
    )


def doubts_text(doubts: Sequence[str]) -> str:
    """A sentence, with a space before it; nothing without doubts."""
    return f" This is a warning only, because {names_text(doubts)}." if doubts else ""


def limited_by(rows: Rows) -> Iterator[Cause]:
    """Variables in NCCL's own log that limit it."""
    logs = [row.log for row in rows.values() if row.log is not None]
    given = dict.fromkeys(f"{name}={log.settings[name]}" for log in logs for name in _LIMITING if name in log.settings)
    if given:
        names = ", ".join(sorted({setting.partition("=")[0] for setting in given}))
        yield Cause(f"{', '.join(given)} limits NCCL", f"Unset {names} and run again.")


def path_of(collective: str, rows: Rows, hosts: Hosts) -> Path | str:
    """The rate that the path of these ranks should reach; or the reason why it is not known."""
    ranks = [rank for own in hosts.values() for rank in own]
    if missing := [rank for rank in ranks if rank not in rows]:
        return f"the links of {ranks_text(missing)} are not known"
    host_of = {rank: host for host, own in hosts.items() for rank in own}
    hops = {(hop.source, hop.target, hop.text): hop for rank in ranks for hop in rows[rank].hops}.values()
    inside = [hop for hop in hops if host_of.get(hop.source) == host_of.get(hop.target)]
    limits = _limits(rows, hosts, [hop for hop in hops if hop not in inside], inside)
    if isinstance(limits, str):
        return limits
    lowest = bound(collective, "nccl", hosts, limits)
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
    """The links of each rank that NCCL uses; or why they are not known.

    A network card's nominal speed counts for InfiniBand and RoCE only: TCP reaches what its hosts' cores can copy.
    """
    if any(hop.kind == "NET" for hop in inside):
        return "NCCL uses the network inside a host"
    # P2P between hosts is MNNVL (transport/p2p.cc).
    crossing = [hop for hop in outside if hop.kind != "P2P"]
    if any(hop.name == SOCKET for hop in crossing):
        return "NCCL sends over TCP sockets, for which no rate is expected"
    if len(hosts) > 1 and not all(hop.name.startswith("IB") for hop in crossing):
        return f"what {names_text(sorted({hop.text for hop in crossing}), 4)} can carry is not known"
    domains = _nvlink_domains(rows, hosts, crossing)
    over_nvlink = len(hosts) > 1 and None not in domains.values() and len({*domains.values()}) == 1
    through_host = any(hop.kind == "SHM" for hop in inside)
    limits: dict[int, Limits] = {}
    for host, own in hosts.items():
        rail = _rails(own, rows) if len(hosts) > 1 and not over_nvlink else Limits()
        if rail is None:
            return f"which network ports of {host} NCCL uses is not known"
        for rank in own:
            links = rows[rank].links
            used = Connections(pcie_bytes_per_s=links.pcie_bytes_per_s) if through_host else links
            limits[rank] = structs.replace(rail, **structs.asdict(used) | {"nvlink_domain": domains[rank]})
    return limits


def _nvlink_domains(rows: Rows, hosts: Hosts, crossing: Sequence[Hop]) -> dict[int, str | None]:
    """The domain of NVLinks of each rank, by NVML; None for all where NCCL uses none between hosts.

    Variables may forbid it; or NCCL's log shows the network between ranks of one domain.
    """
    logs = [row.log for row in rows.values() if row.log is not None]
    domains = {rank: rows[rank].links.nvlink_domain for own in hosts.values() for rank in own}
    unused = any(domains.get(hop.source) == domains.get(hop.target) for hop in crossing)
    if unused or not all(allows_mnnvl(log.settings) for log in logs):
        return dict.fromkeys(domains)
    return domains


def _rails(own: Sequence[int], rows: Rows) -> Limits | None:
    """The RDMA ports of a host that NCCL's log names by number; None where their rate is not known."""
    devices = {device for rank in own for hop in rows[rank].hops if hop.kind == "NET" for device in hop.devices}
    ports = rows[own[0]].usable_ports
    rates = [port.bytes_per_s for port in ports if port.bytes_per_s]
    number = min(len(devices), len(rates))
    if not number or len(rates) < len(ports):
        return None
    rate = min(rates)
    return Limits(nic=f"{number} ports", nic_bytes_per_s=number * rate, nic_ports=number, nic_port_bytes_per_s=rate)
