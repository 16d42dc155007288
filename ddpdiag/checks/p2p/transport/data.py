"""What P2P004 measured, and what its findings are made of: the ways that NCCL took, within hosts and between them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.launch import variables
from ddpdiag.probes.gpu.links import Connections
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.nccl_log import Hop, Log

SOCKET = "Socket"
# Variables by which users choose a transport, and those that follow from it.
_CHOOSING = (
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IBVERBS_LIB", "NCCL_NET_GDR_LEVEL",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_HOSTID", "NCCL_NVLS_ENABLE",
)  # fmt: skip


class Data(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank: NCCL's log (None: it wrote none), its GPU and NVLinks, and the host's network.

    `socket_bytes_per_s` is the nominal rate of the interfaces that NCCL uses for sockets, together. `peer_memory`: is
    nvidia-peermem loaded?
    """

    log: Log | None = None
    gpu_uuid: str | None = None
    links: Connections = Connections()
    ports: tuple[Port, ...] = ()
    socket_bytes_per_s: float | None = None
    peer_memory: bool = False


@dataclass(frozen=True)
class View:
    """All ranks' logs together."""

    seen: Seen[Data]

    @cached_property
    def rows(self) -> Mapping[int, Data]:
        """Each rank's answer."""
        return self.seen.by_rank

    @cached_property
    def logs(self) -> Mapping[int, Log]:
        """The logs of the ranks that have one."""
        return {rank: data.log for rank, data in sorted(self.rows.items()) if data.log is not None}

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Every way once, whoever told it."""
        told = (hop for log in self.logs.values() for hop in log.hops)
        return tuple({(hop.source, hop.target, hop.text): hop for hop in told}.values())

    @cached_property
    def _hosts(self) -> Mapping[int, tuple[str, str]]:
        return {rank: host for host, ranks in self.seen.world.hosts.items() for rank in ranks}

    def host(self, rank: int) -> str:
        """The name of a rank's host."""
        return self.seen.world.node_of(rank)

    def is_inside(self, hop: Hop) -> bool:
        """Are both ends on one host?"""
        return hop.source in self._hosts and self._hosts[hop.source] == self._hosts.get(hop.target)

    @cached_property
    def inside(self) -> tuple[Hop, ...]:
        """Ways within a host."""
        return tuple(filter(self.is_inside, self.hops))

    @cached_property
    def outside(self) -> tuple[Hop, ...]:
        """Ways over the network from host to host; with MNNVL there are others."""
        return tuple(hop for hop in self.hops if hop.kind == "NET" and not self.is_inside(hop))

    @cached_property
    def by_rank(self) -> Mapping[int, Sequence[Hop]]:
        """The ways that begin or end at each rank."""
        own: dict[int, list[Hop]] = defaultdict(list)
        for hop in self.hops:
            own[hop.source].append(hop)
            own[hop.target].append(hop)
        return own

    def are_linked(self, one: int, other: int) -> bool:
        """Do NVLinks lead from the GPU of one rank to that of the other? By NCCL's map of the host, or by NVML's.

        NCCL's map lacks the GPUs of ranks that it takes to be on another host (NCCL_HOSTID); NVML's knows of a switch.
        """
        log = self.logs.get(one)
        if log is not None and other in log.nvlinked.get(one, ()):
            return True
        both = [self.rows[rank].links for rank in (one, other) if rank in self.rows]
        return len(both) == 2 and all(links.nvlink_switched and links.nvlinks for links in both)

    def ports(self, host: str) -> tuple[Port, ...]:
        """The RDMA ports of a host that are up: InfiniBand where there is any, else RoCE."""
        up = tuple(port for port in self._ports.get(host, ()) if port.active)
        return tuple(port for port in up if port.infiniband) or up

    @cached_property
    def _ports(self) -> Mapping[str, tuple[Port, ...]]:
        return {self.host(rank): data.ports for rank, data in self.rows.items()}

    def reasons(self, ranks: Sequence[int], names: Sequence[str] = _CHOOSING) -> tuple[str, ...]:
        """Why NCCL chose so on these ranks: variables that it was given, and what it says itself."""
        return tuple(dict.fromkeys((*self._variables(ranks, names), *self._notes(ranks))))[:4]

    def settings(self, rank: int) -> Mapping[str, str]:
        """The variables of a rank that decide on transports: as LCH002 saw them, and as NCCL did."""
        own = self._environments.get(rank)
        files = own.files.values() if own is not None else ()
        known = {name: value for row in files for name, value in row.items()}
        known |= dict(own.variables) if own is not None else {}
        known |= self.logs[rank].settings if rank in self.logs else {}
        return {name: value for name, value in known.items() if name in _CHOOSING}

    @cached_property
    def _environments(self) -> Mapping[int, variables.Data]:
        return self.seen.of(variables.CHECK).by_rank

    @cached_property
    def told_of_host_ids(self) -> bool:
        """Does LCH002 speak of NCCL_HOSTID?"""
        return any(finding.code == "LCH002.host-id" for finding in self.seen.findings_of("LCH002"))

    def _variables(self, ranks: Sequence[int], names: Sequence[str]) -> Iterator[str]:
        for rank in ranks:
            found = self.settings(rank)
            yield from (f"{name}={found[name]}" for name in names if name in found)

    def _notes(self, ranks: Sequence[int]) -> Iterator[str]:
        return (f"'{note}'" for rank in ranks if rank in self.logs for note in self.logs[rank].notes)


@lru_cache(maxsize=1)
def view_of(seen: Seen[Data]) -> View:
    """The view, made once."""
    return View(seen)
