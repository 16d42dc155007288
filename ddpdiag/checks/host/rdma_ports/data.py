"""What HST007 knows of each host: the RDMA ports that the job takes, and what can be compared between hosts."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import Host, answers_by_host, names_text
from ddpdiag.checks.rendezvous import interfaces as rdz003
from ddpdiag.model import Severity
from ddpdiag.probes.gpu.paths import Level
from ddpdiag.probes.net.adapters import Port, nccl_takes_port
from ddpdiag.probes.net.interfaces import chosen_address, interface_of, library_of
from ddpdiag.probes.net.rdma import Adapter, Gid, Gpu, distance
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import count

# Others (EFA says "Unknown") are skipped by NCCL's own network (net_ib/init.cc); plug-ins may use them.
LAYERS = ("InfiniBand", "Ethernet")
# So many are written out, and listed as evidence.
NAMES, LISTED = 4, 16


class Data(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RDMA adapters of a host (None: /sys cannot be read), their ports, and by the port's name its GIDs (Ethernet
    only) and interfaces; NVIDIA's GPUs on the bus; the variables that decide which ports NCCL takes."""

    adapters: tuple[Adapter, ...] | None = ()
    ports: tuple[Port, ...] = ()
    gids: dict[str, tuple[Gid, ...]] = {}
    interfaces: dict[str, tuple[str, ...]] = {}
    gpus: tuple[Gpu, ...] = ()
    settings: dict[str, str] = {}

    @property
    def is_over_verbs(self) -> bool:
        """May NCCL take RDMA ports, by its variables?"""
        no_verbs = self.settings.get("NCCL_IB_DISABLE", "0") != "0"
        # Plug-ins that build on it are IBext and IBext_v8.
        return not no_verbs and self.settings.get("NCCL_NET", "IB").upper().startswith("IB")

    @property
    def rule(self) -> str:
        """NCCL_IB_HCA."""
        return self.settings.get("NCCL_IB_HCA", "")

    @property
    def verbs_ports(self) -> tuple[Port, ...]:
        """Ports that NCCL's own network can take."""
        return tuple(port for port in self.ports if port.link_layer in LAYERS)


class Count(NamedTuple):
    """How many ports of one link layer there are, and how many are up."""

    layer: str
    ports: int
    up: int


@dataclass(frozen=True)
class HostPorts:
    """One host and the ports that the job takes, up or not. `by_nccl`: NCCL takes them, else the job's sockets do."""

    host: Host
    data: Data
    ports: tuple[Port, ...]
    by_nccl: bool

    @property
    def name(self) -> str:
        return self.host.name

    @cached_property
    def up(self) -> tuple[Port, ...]:
        """Those of the ports whose link is up."""
        return tuple(port for port in self.ports if port.active)

    @cached_property
    def _adapters(self) -> dict[str, Adapter]:
        return {adapter.name: adapter for adapter in self.data.adapters or ()}

    def adapter(self, port: Port) -> Adapter:
        return self._adapters.get(port.adapter) or Adapter(name=port.adapter)

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple({port.adapter: self.adapter(port) for port in self.ports}.values())

    def label(self, port: Port, *more: str) -> str:
        """Such as "mlx5_0:1 (PCI 0000:1b:00.0)", and `more` in the brackets."""
        slot = self.adapter(port).slot
        known = [*([f"PCI {slot.pci}"] if slot else []), *more]
        return f"{port.name} ({', '.join(known)})" if known else port.name

    @cached_property
    def counts(self) -> tuple[Count, ...]:
        """The number of ports by link layer, and how many of them are up."""
        present, up = (Counter(port.link_layer for port in ports) for ports in (self.ports, self.up))
        return tuple(Count(layer, present[layer], up[layer]) for layer in LAYERS if present[layer])

    @cached_property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """Link layer and rate of each port that is up, in order; 0 where a port does not say."""
        return tuple(sorted(rate_of(port) for port in self.up))

    @cached_property
    def unrouted(self) -> tuple[Port, ...]:
        """RoCE ports that are up and have GIDs, none of them of RoCE v2 with an address."""
        return tuple(port for port in self.up if self.is_unrouted(port))

    def is_unrouted(self, port: Port) -> bool:
        """Has this port types of GIDs, and none is of RoCE v2 with an address of the interface? iWARP has none."""
        gids = self.data.gids.get(port.name, ())
        told = any(gid.kind for gid in gids) and self.adapter(port).kind in ("CA", None)
        return told and not any(gid.is_routed for gid in gids)

    @cached_property
    def nearest(self) -> tuple[Level, ...]:
        """For each GPU of the bus how near its nearest port is, in order; empty where that is not known."""
        slots = [adapter.slot for adapter in self.adapters if adapter.slot]
        every = ([distance(gpu.slot, slot) for slot in slots] for gpu in self.data.gpus)
        levels = [min(known) for own in every if (known := [level for level in own if level is not None])]
        return tuple(sorted(levels)) if len(levels) == len(self.data.gpus) else ()

    def releases(self, model: str) -> tuple[str, ...]:
        """The releases of the firmware of all adapters of that model."""
        return tuple(sorted({own for each in self.adapters if each.model == model and (own := release(each))}))

    def firmware_text(self, model: str) -> str:
        """Such as "28.39.1002 (7 adapters), 28.38.1900 (1 adapter)"."""
        known = Counter(each.firmware for each in self.adapters if each.model == model and each.firmware)
        return ", ".join(f"{firmware} ({count(number, 'adapter')})" for firmware, number in known.most_common())

    def families(self) -> Iterator[tuple[Port, ...]]:
        """Ports of the same model and board with the same link layer, three at least: what is comparable within a host.

        A frontend's card is another board than those of the GPUs' network, or has another link layer.
        """
        families: dict[tuple[str | None, ...], list[Port]] = {}
        for port in self.ports:
            adapter = self.adapter(port)
            families.setdefault((adapter.model, adapter.board, port.link_layer), []).append(port)
        yield from (tuple(ports) for ports in families.values() if len(ports) > 2)


def rate_of(port: Port) -> tuple[str, float]:
    """Link layer and rate of a port; 0 where it does not say."""
    return port.link_layer or "", port.bytes_per_s or 0.0


def release(adapter: Adapter) -> str | None:
    """The release of its firmware: 28.39.1002 of mlx5 is of release 28.39, where 28 is the chip; else the first number.

    Versions within a release are bug fixes, which may differ.
    """
    parts = (adapter.firmware or "").split(".")
    return ".".join(parts[: 2 if (adapter.driver or "").startswith("mlx") else 1]) or None


def severity_of(seen: Seen[Data]) -> Severity:
    """What breaks jobs between hosts is worth a warning on one host alone, or where NCCL worked all the same.

    A network plug-in need not go over these ports.
    """
    return Severity.ERROR if len(seen.world.hosts) > 1 and not seen.job_backend_works else Severity.WARNING


def hosts_with_ports(seen: Seen[Data]) -> tuple[HostPorts, ...]:
    """Each host that could be looked at, and the ports that the job takes there."""
    chosen = seen.of(rdz003.CHECK).by_rank
    hosts = []
    for host, rows in answers_by_host(seen):
        data = next(iter(rows.values()))
        if data.adapters is None:
            continue
        by_nccl = seen.world.backend == "nccl" and data.is_over_verbs
        own = next((chosen[rank] for rank in host.ranks if rank in chosen), None)
        ports = _nccl_ports(data) if by_nccl else _socket_ports(data, own, seen.world.backend)
        hosts.append(HostPorts(host, data, tuple(ports), by_nccl))
    return tuple(hosts)


def _nccl_ports(data: Data) -> Iterator[Port]:
    """Ports that NCCL takes, or would if they were up. A virtual function that is down is given to no container."""
    virtual = {adapter.name for adapter in data.adapters or () if adapter.virtual}
    for port in data.verbs_ports:
        is_given = port.active or port.adapter not in virtual
        if is_given and nccl_takes_port(data.rule, port.adapter, port.number):
            yield port


def _socket_ports(data: Data, own: rdz003.Data | None, backend: str) -> Iterator[Port]:
    """Ports that are up below the interface whose address the job offers; RDZ003 says if that one is down."""
    if own is None or own.interfaces is None:
        return
    address = chosen_address(library_of(backend), own.names, own.own_addresses, own.interfaces)
    interface = interface_of(address, own.interfaces)
    for port in data.verbs_ports:
        if port.active and interface is not None and interface.name in data.interfaces.get(port.name, ()):
            yield port


def comparable(hosts: Iterable[HostPorts]) -> Iterator[list[HostPorts]]:
    """Hosts with the same models of GPUs, since others may have other networks, and with RDMA or all without."""
    groups: dict[tuple[bool, frozenset[str | None]], list[HostPorts]] = {}
    for own in hosts:
        groups.setdefault((own.by_nccl, frozenset(gpu.model for gpu in own.data.gpus)), []).append(own)
    yield from groups.values()


def compare(
    hosts: Sequence[HostPorts], value: Callable[[HostPorts], Hashable]
) -> tuple[Sequence[HostPorts], Sequence[HostPorts], Sequence[Sequence[HostPorts]]]:
    """Hosts that have the value that more than half of them have, and the others; groups if there is no majority."""
    odd = odd_ones_out({number: value(own) for number, own in enumerate(hosts)})
    if odd is None:
        return hosts, (), ()
    groups = {own: [hosts[number] for number in numbers] for own, numbers in odd.groups.items()}
    if not odd.ranks:
        return (), (), [*groups.values()]
    return groups[odd.usual], [hosts[number] for number in odd.ranks], ()


def roce_version_is_2(data: Data) -> bool:
    """Does NCCL look for RoCE v2, as it does by itself, and find the GID itself?"""
    return data.settings.get("NCCL_IB_ROCE_VERSION_NUM", "2") == "2" and gid_index(data) is None


def gid_index(data: Data) -> int | None:
    """NCCL_IB_GID_INDEX; None where NCCL looks for the GID itself."""
    value = data.settings.get("NCCL_IB_GID_INDEX", "")
    return int(value) if value.isdecimal() else None


def counts_text(own: HostPorts) -> str:
    """Such as "8 InfiniBand ports", or "7 of 8 InfiniBand ports up"."""
    parts = [
        count(each.ports, f"{each.layer} port")
        if each.up == each.ports
        else f"{each.up} of {count(each.ports, f'{each.layer} port')} up"
        for each in own.counts
    ]
    return " and ".join(parts) or "no RDMA port"


def states_text(own: HostPorts) -> str:
    """The same, with the ports that are not up: "7 of 8 InfiniBand ports up (mlx5_3:1 is DOWN)"."""
    named = [f"{port.name} is {state_text(port)}" for port in own.ports if not port.active]
    return counts_text(own) + (f" ({names_text(named, NAMES)})" if named else "")


def state_text(port: Port) -> str:
    """Such as "DOWN (Polling)"."""
    return (port.state or "in an unknown state") + (f" ({port.physical_state})" if port.physical_state else "")


def port_rate_text(port: Port) -> str:
    """Such as "400 Gbit/s (4 lanes)"."""
    rate = f"{port.bytes_per_s * 8 / 1e9:g} Gbit/s" if port.bytes_per_s else "an unknown rate"
    return rate + (f" ({count(port.lanes, 'lane')})" if port.lanes else "")


def rates_text(own: HostPorts) -> str:
    """Such as "7 ports at 400 Gbit/s (4 lanes), mlx5_3:1 at 200 Gbit/s (4 lanes)"; a few that differ are named."""
    known: dict[str, list[str]] = {}
    for port in own.up:
        known.setdefault(port_rate_text(port), []).append(port.name)
    parts = [
        f"{', '.join(names) if 4 * len(names) <= len(own.up) else count(len(names), 'port')} at {rate}"
        for rate, names in known.items()
    ]
    return ", ".join(parts) or "no port that is up"


def unrouted_text(own: HostPorts) -> str:
    """Ports that lack the GID that NCCL looks for."""
    names = names_text([port.name for port in own.unrouted], NAMES)
    which = f"no RoCE v2 GID with an IP address on {names}"
    return which if names else "every RoCE port has a RoCE v2 GID with an IP address"


def levels_text(own: HostPorts) -> str:
    """Such as "PIX (7 GPUs), SYS (1 GPU)"."""
    return ", ".join(f"{level.name} ({count(number, 'GPU')})" for level, number in Counter(own.nearest).items())
