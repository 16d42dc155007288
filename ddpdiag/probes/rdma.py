"""RDMA ports of this host, and what lets a network card reach a GPU's memory (GPUDirect RDMA)."""

from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.files import read_text

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
