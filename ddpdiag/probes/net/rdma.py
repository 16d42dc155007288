"""RDMA ports of this host, GPUDirect RDMA, and the network card that a collective takes to other hosts."""

import socket
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import read_text
from ddpdiag.probes.host.variables import nccl_files
from ddpdiag.probes.net.interfaces import bindable, chosen_address, interface_of, interfaces, wanted
from ddpdiag.probes.net.tcp_connect import is_loopback, resolve

# nvidia-peermem, and what was there before it, in the places in which NCCL looks (net_ib/gdr.cc).
_PEER_MEMORY = (
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nvidia-peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
)


class Port(Struct, frozen=True, kw_only=True):
    """A port of an RDMA adapter. `infiniband`: else its link layer is Ethernet (RoCE). `active`: its link is up.

    `bytes_per_s` is its rate in one direction, None where it does not say.
    """

    adapter: str
    number: str
    infiniband: bool
    active: bool
    bytes_per_s: float | None = None

    @property
    def name(self) -> str:
        """As NCCL writes it: "mlx5_0:1"."""
        return f"{self.adapter}:{self.number}"


def rdma_ports(sys: Path) -> tuple[Port, ...]:
    """All ports that `sys` (/sys) shows; none without an RDMA driver."""
    return tuple(
        Port(
            adapter=port.parts[-3],
            number=port.name,
            infiniband=read_text(port / "link_layer") == "InfiniBand",
            # "4: ACTIVE"; "5: ACTIVE_DEFER" is a link that is going down (IBTA, PortState).
            active=(read_text(port / "state") or "").endswith("ACTIVE"),
            bytes_per_s=_rate(read_text(port / "rate")),
        )
        for port in sorted((sys / "class" / "infiniband").glob("*/ports/*"))
    )


def has_peer_memory(sys: Path) -> bool:
    """Is nvidia-peermem loaded? DMA-BUF does without it."""
    return any((sys / place).exists() for place in _PEER_MEMORY)


def _rate(text: str | None) -> float | None:
    """Bytes per second of "400 Gb/sec (4X NDR)"."""
    number = (text or "").split(" ")[0]
    try:
        return float(number) * 125e6
    except ValueError:
        return None


_NAME_SECONDS = 2.0


class Card(Struct, frozen=True):
    """One port of a network card, or several that are used together.

    `bytes_per_s` is the nominal speed of all `ports` together, `port_bytes_per_s` that of the slowest; None where the
    speed of a port is not known.
    """

    name: str
    bytes_per_s: float | None
    ports: int
    port_bytes_per_s: float | None


def route_out(library: str, env: Mapping[str, str], sys: Path) -> Card | None:
    """What `library` ("gloo" or "nccl") takes: InfiniBand where nccl finds it, else the interface of its address."""
    if library == "nccl" and _nccl(env, "NCCL_IB_DISABLE") in ("", "0"):
        found = infiniband(sys, _nccl(env, "NCCL_IB_HCA"))
        if found is not None:
            return found
    known = interfaces(sys) or ()
    own = bindable(resolve(socket.gethostname(), 0, _NAME_SECONDS) or ())
    address = chosen_address(library, wanted(env), own, known)
    if address is None or is_loopback(address):
        return None
    interface = interface_of(address, known)
    return Card(interface.name, interface.bytes_per_s, 1, interface.bytes_per_s) if interface else None


def _nccl(env: Mapping[str, str], name: str) -> str:
    """A variable as NCCL finds it: the environment wins over its configuration files. Empty where it is not set."""
    files = (settings[name] for settings in nccl_files(env).values() if name in settings)
    return env[name] if name in env else next(files, "")


def infiniband(sys: Path, rule: str = "") -> Card | None:
    """All ports of InfiniBand and RoCE adapters that are up and that `rule`, a value of NCCL_IB_HCA, allows, together.

    None if there is none, or none of them says how fast it is.
    """
    taken = _taken(sys, rule)
    rates = [port.bytes_per_s for port in taken]
    known = [rate for rate in rates if rate]
    if not known:
        return None
    name = "+".join(dict.fromkeys(port.adapter for port in taken))
    if len(known) < len(rates):
        return Card(name, None, len(rates), None)
    return Card(name, sum(known), len(known), min(known))


def nccl_ports(env: Mapping[str, str], sys: Path) -> tuple[str, ...]:
    """Names ("mlx5_0:1") of the RDMA ports that are up and that NCCL would go over; none with NCCL_IB_DISABLE."""
    if _nccl(env, "NCCL_IB_DISABLE") not in ("", "0"):
        return ()
    return tuple(port.name for port in _taken(sys, _nccl(env, "NCCL_IB_HCA")))


def _taken(sys: Path, rule: str) -> list[Port]:
    return [port for port in rdma_ports(sys) if port.active and nccl_takes_port(rule, port.adapter, port.number)]


def nccl_takes_port(rule: str, adapter: str, port: str) -> bool:
    """Does a value of NCCL_IB_HCA allow this port of this adapter? As NCCL reads it (net_ib.cc, utils.cc).

    "^" excludes what follows, "=" behind it wants exact names, else the words are prefixes; a word may end in ":port".
    Without a word, all match.
    """
    others, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    words = [tuple(word.split(":")) for word in rule.split(",") if word.partition(":")[0]]
    hit = not words or any(
        (adapter == name if exact else adapter.startswith(name)) and (not number or number[0] in ("", port))
        for name, *number in words
    )
    return hit != others
