"""NCCL's log of itself (NCCL_DEBUG=INFO): the path to each peer, NVLS, settings and warnings.

The lines are those of NCCL 2.12 to 2.30 (init.cc, net.cc, and transport/p2p.cc, shm.cc, net.cc, net_ib.cc,
net_socket.cc, nvls.cc). They are meant for people and change from version to version: a line of another form is left
out, and what no line says is None.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.environment import is_recorded

# The start of a log holds the initialisation, which is all that is looked for.
MAX_BYTES = 4 << 20
_MOST_LINES = 8
_MOST_CHARACTERS = 200
_LINE = re.compile(r"NCCL (INFO|WARN) (.*)")
# "Channel 02 : 0[1000] -> 1[2000]" up to 2.12 and for SHM still; "Channel 02/0 : 0[0] -> 1[1] [send] via ..." else.
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d{1,9})\[[0-9a-f]+\] -> (\d{1,9})\[[0-9a-f]+\](?: \[(?:send|receive)\])? via (\S.*)"
)
# The name of a plugin may hold a space ("AWS Libfabric"); "(5)" is the rank whose NIC is used (PXN).
_NET = re.compile(r"NET/([^/]+)/(\d{1,9})(?:\(\d+\))?(/.*)?")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?")
_SOCKETS = re.compile(r"NET/Socket : Using (.*)")
_NVLS_CHANNELS = re.compile(r"\d+ coll channels, (?:\d+ collnet channels, )?(\d{1,9}) nvls channels")
# Why NCCL chose what it chose.
_NOTES = (
    "NET/IB : No device found",
    "NET/IB : No IP interface found",
    "Count not open",  # sic: libibverbs.so
    "Failed to open lib",
    "P2P is disabled between",
    "Could not enable P2P between",
    "MNNVL is not supported",
)


class Hop(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The path from `source` to `target`, both by rank. `kind` is P2P, SHM or NET.

    `name` is the network ("IB", "Socket") or the flavour ("CUMEM", "IPC", "direct"). `gdr`: the NIC reads or writes the
    GPU's memory itself (GPUDirect RDMA). `devices` are NCCL's numbers of the NICs.
    """

    source: int
    target: int
    kind: str
    name: str
    gdr: bool = False
    devices: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Such as "P2P/CUMEM" or "NET/IB/GDRDMA"."""
        return "/".join(filter(None, (self.kind, self.name, "GDRDMA" if self.gdr else "")))


class Log(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's log.

    `sockets` are names of interfaces. NVLink SHARP is used if `nvls_channels` is above 0. `settings` are variables that
    NCCL obeyed, `notes` reasons, `warnings` its own.
    """

    sockets: tuple[str, ...] = ()
    hops: tuple[Hop, ...] = ()
    nvls_channels: int | None = None
    settings: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_log(path: Path) -> Log | None:
    """The log in a file, or None if NCCL wrote nothing there that can be understood."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    log = parse(text)
    return log if log != Log() else None


def parse(text: str) -> Log:
    """Read the lines of a log; never raises."""
    found = [(match[1], match[2].strip()) for line in text.split("\n") if (match := _LINE.search(line))]
    lines = [message for _, message in found]
    sockets = next((match[1] for line in lines if (match := _SOCKETS.match(line))), "")
    return Log(
        sockets=tuple(dict.fromkeys(re.findall(r"\[\d+\]([^\s:]+):", sockets))),
        hops=_hops(lines),
        nvls_channels=next((int(match[1]) for line in lines if (match := _NVLS_CHANNELS.match(line))), None),
        settings=_settings(lines),
        notes=_some(line for line in lines if line.startswith(_NOTES)),
        warnings=_some(message for level, message in found if level == "WARN"),
    )


def _some(messages: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(message[:_MOST_CHARACTERS] for message in messages))[:_MOST_LINES]


def _hops(lines: Sequence[str]) -> tuple[Hop, ...]:
    # Devices by source, target, kind, name and whether it is GPUDirect RDMA.
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
    # How the log itself was asked for is no news.
    known = {row[1]: row[2][:_MOST_CHARACTERS] for row in found if is_recorded(row[1])}
    return {name: value for name, value in sorted(known.items()) if not name.startswith("NCCL_DEBUG")}
