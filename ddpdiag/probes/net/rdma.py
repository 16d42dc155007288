"""RDMA adapters of this host as /sys shows them: model, firmware, PCI address, and the GIDs (addresses) of their ports.

State and rate of a port's link are read in `adapters.py`. A value that cannot be read is None.
"""

import contextlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.gpu.visibility import nvidia_functions
from ddpdiag.probes.host.kernel import names_in, read_text
from ddpdiag.probes.net.adapters import Port, nccl_variable, pci_of

# The variables by which NCCL selects ports and GIDs (net_ib/init.cc, net_ib/connect.cc).
_SELECTING_VARIABLES = ("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX")
ROCE_V2 = "RoCE v2"
_LINK_LOCAL = ipaddress.IPv6Network("fe80::/64")  # as in NCCL (linkLocalGid in net_ib/connect.cc)
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Adapter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An RDMA adapter. `model` is its chip ("MT4129"), `board` the card that carries it ("MT_0000000838").

    `kind` is the kernel's node type: "CA", or "RNIC" for iWARP. `virtual` says that the adapter is a virtual function,
    and that its physical function is on the same host. `pci` is None for an adapter in software.
    """

    name: str
    model: str | None = None
    board: str | None = None
    firmware: str | None = None
    kind: str | None = None
    virtual: bool = False
    pci: str | None = None


class Gid(Struct, frozen=True, array_like=True):
    """An address of a RoCE port, the address's index in the port's table, and its type ("RoCE v2"; None: not known).

    A GID is recorded as a list of its fields, so new fields must be added at the end.
    """

    index: int
    address: str
    kind: str | None = None

    @property
    def is_routed(self) -> bool:
        """Whether packets with this GID can be routed: RoCE v2, and an address that is not link-local."""
        with contextlib.suppress(ValueError):
            return self.kind == ROCE_V2 and ipaddress.IPv6Address(self.address) not in _LINK_LOCAL
        return False


def rdma_adapters(sys: Path) -> tuple[Adapter, ...] | None:
    """Read all adapters that `sys` (/sys) shows; empty without an RDMA driver, None if /sys/class cannot be listed."""
    if names_in(sys / "class") is None:
        return None
    adapters = []
    for name in names_in(sys / "class" / "infiniband") or ():
        device = sys / "class" / "infiniband" / name
        adapter = Adapter(
            name=name,
            model=read_text(device / "hca_type") or None,
            board=read_text(device / "board_id") or None,
            firmware=read_text(device / "fw_ver") or None,
            kind=(read_text(device / "node_type") or "").rpartition(": ")[2] or None,
            virtual=(device / "device" / "physfn").exists(),
            pci=pci_of(device),
        )
        adapters.append(adapter)
    return tuple(adapters)


def roce_gids(sys: Path, port: Port) -> tuple[Gid, ...]:
    """Read the GIDs of a port, without empty entries. The kernel's table has up to 256 entries."""
    folder = sys / "class" / "infiniband" / port.adapter / "ports" / port.number
    numbers = sorted(int(name) for name in names_in(folder / "gids") or () if name.isdecimal())
    known = ((number, read_text(folder / "gids" / str(number)) or _NO_GID) for number in numbers)
    return tuple(
        Gid(number, address, read_text(folder / "gid_attrs" / "types" / str(number)) or None)
        for number, address in known
        if address != _NO_GID
    )


def gpu_device_ids(sys: Path) -> tuple[str, ...]:
    """Read the PCI device ids ("0x2330") of the NVIDIA GPUs, in bus order; "" if an id is not readable."""
    devices = sys / "bus" / "pci" / "devices"
    return tuple(read_text(devices / function.address / "device") or "" for function in nvidia_functions(sys) or ())


def nccl_settings(env: Mapping[str, str]) -> dict[str, str]:
    """The variables by which NCCL selects ports and GIDs, with the values that NCCL would read."""
    return {name: value for name in _SELECTING_VARIABLES if (value := nccl_variable(env, name))}
