"""Parse NCCL's own log (NCCL_DEBUG=INFO): the path to each peer, NVLS (NVLink SHARP), settings and warnings.

The patterns match the lines of NCCL 2.12 to 2.30 (init.cc, net.cc, and transport/p2p.cc, shm.cc, net.cc, net_ib.cc,
net_socket.cc, nvls.cc). The lines are written for people and change between versions. A line in another form is
ignored, and a value that no line shows is None or empty.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.environment import is_recorded

# Only the start of a log is read, because it contains the initialisation.
MAX_BYTES = 4 << 20
_MAX_LINES = 8
_MAX_CHARACTERS = 200
_LINE = re.compile(r"NCCL (INFO|WARN) (.*)")
# "Channel 02/0 : 0[0] -> 1[1] [send] via ..."; up to NCCL 2.12, and for SHM, "Channel 02 : 0[1000] -> 1[2000] ...".
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d{1,9})\[[0-9a-f]+\] -> (\d{1,9})\[[0-9a-f]+\](?: \[(?:send|receive)\])? via (\S.*)"
)
# The name of a plugin may contain a space ("AWS Libfabric"). "(5)" is the rank whose NIC is used (PXN).
_NET = re.compile(r"NET/([^/]+)/(\d{1,9})(?:\(\d+\))?(/.*)?")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?")
_SOCKETS = re.compile(r"NET/Socket : Using (.*)")
_NVLS_CHANNELS = re.compile(r"\d+ coll channels, (?:\d+ collnet channels, )?(\d{1,9}) nvls channels")
# Lines that explain a choice of NCCL.
_EXPLAINING_LINES = (
    "NET/IB : No device found",
    "NET/IB : No IP interface found",
    "Count not open",  # sic: libibverbs.so
    "Failed to open lib",
    "P2P is disabled between",
    "Could not enable P2P between",
    "MNNVL is not supported",
)


class Hop(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The path from rank `source` to rank `target`. `kind` is "P2P", "SHM" or "NET".

    `name` is the network ("IB", "Socket") or the variant ("CUMEM", "IPC", "direct"). `gdr` says that the NIC accesses
    the GPU's memory directly (GPUDirect RDMA). `devices` are the NICs, as NCCL numbers them.
    """

    source: int
    target: int
    kind: str
    name: str
    gdr: bool = False
    devices: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The path as text, such as "P2P/CUMEM" or "NET/IB/GDRDMA"."""
        return "/".join(filter(None, (self.kind, self.name, "GDRDMA" if self.gdr else "")))


class NcclLog(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of one rank's log.

    `sockets` are the names of the interfaces that NCCL uses. NVLink SHARP is used if `nvls_channels` is above 0.
    `settings` are the variables that NCCL read, `notes` the lines that explain a choice of NCCL.
    """

    sockets: tuple[str, ...] = ()
    hops: tuple[Hop, ...] = ()
    nvls_channels: int | None = None
    settings: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_log(path: Path) -> NcclLog | None:
    """Read a log file; None if it cannot be read, or has no line in a known form."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    log = parse_log(text)
    return log if log != NcclLog() else None


def parse_log(text: str) -> NcclLog:
    """Parse the text of a log. Unknown lines are ignored."""
    found = [(match[1], match[2].strip()) for line in text.split("\n") if (match := _LINE.search(line))]
    lines = [message for _, message in found]
    sockets = next((match[1] for line in lines if (match := _SOCKETS.match(line))), "")
    return NcclLog(
        sockets=tuple(dict.fromkeys(re.findall(r"\[\d+\]([^\s:]+):", sockets))),
        hops=_hops(lines),
        nvls_channels=next((int(match[1]) for line in lines if (match := _NVLS_CHANNELS.match(line))), None),
        settings=_settings(lines),
        notes=_distinct(line for line in lines if line.startswith(_EXPLAINING_LINES)),
        warnings=_distinct(message for level, message in found if level == "WARN"),
    )


def _distinct(messages: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(message[:_MAX_CHARACTERS] for message in messages))[:_MAX_LINES]


def _hops(lines: Sequence[str]) -> tuple[Hop, ...]:
    # The devices of each path: a path has many channels, each with a line and a device.
    hops: dict[tuple[int, int, str, str, bool], set[int]] = {}
    for match in filter(None, map(_CHANNEL.match, lines)):
        net = _NET.match(match[3])
        kind, _, rest = match[3].partition("/")
        name, gdr = (net[1], "GDRDMA" in (net[3] or "")) if net else (rest.partition("/")[0], False)
        devices = hops.setdefault((int(match[1]), int(match[2]), kind, name, gdr), set())
        if net:
            devices.add(int(net[2]))
    return tuple(
        Hop(source=source, target=target, kind=kind, name=name, gdr=gdr, devices=tuple(sorted(devices)))
        for (source, target, kind, name, gdr), devices in hops.items()
    )


def _settings(lines: Sequence[str]) -> dict[str, str]:
    found = (match for line in lines if (match := _SETTING.fullmatch(line)))
    # The settings of the log itself (NCCL_DEBUG...) are omitted.
    known = {row[1]: row[2][:_MAX_CHARACTERS] for row in found if is_recorded(row[1])}
    return {name: value for name, value in sorted(known.items()) if not name.startswith("NCCL_DEBUG")}
