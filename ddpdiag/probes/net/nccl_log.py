"""NCCL's log of itself (NCCL_DEBUG=INFO): its network, the path to each peer, NVLS.

The lines are those of NCCL 2.12 to 2.30 (init.cc, graph/topo.cc, net.cc, and transport/
p2p.cc, shm.cc, net.cc, net_ib.cc, net_socket.cc, nvls.cc). They are meant for people and change from version to
version: a line of another form is left out, and what no line says is None.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.probes.host.environment import is_recorded

# The start of a log holds the initialisation, which is all that is looked for.
MAX_BYTES = 4 << 20
_MOST_LINES = 8
_MOST_CHARACTERS = 200
_LINE = re.compile(r"NCCL (INFO|WARN) (.*)")
# In front of "NCCL" stand host, process and thread ("alpha1:4101:4190 [0]"), and a time if that is asked for.
_THREAD = re.compile(r"(\S+:\d+:\d+) \[\d+\] $")
# "[Rank 0]" since 2.30; the name of the function since 2.21.
_BEGUN = re.compile(r"(?:\[Rank \d+\] )?(?:\w+ )?comm \S+ rank \d+ nranks (\d+) .*Init START")
_VERSION = re.compile(r"NCCL version (\d[\w.]*)")
# "Channel 02 : 0[1000] -> 1[2000]" up to 2.12 and for SHM still; "Channel 02/0 : 0[0] -> 1[1] [send] via ..." else.
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[[0-9a-f]+\] -> (\d+)\[[0-9a-f]+\](?: \[(?:send|receive)\])? via (\S.*)"
)
# RCCL ends it with the communicator.
_RCCL_END = re.compile(r" comm 0x[0-9a-f]+ nRanks \d+.*")
# The name of a plugin may hold a space ("AWS Libfabric"); "(5)" is the rank whose NIC is used (PXN).
_NET = re.compile(r"NET/([^/]+)/(\d+)(?:\(\d+\))?(/.*)?")
_COLLNET = re.compile(r"CollNet \d+(?:/\d+)? : \d+ \[(?:send|receive)\] via COLLNET/([^/]+)/\d+(/GDRDMA)?")
_GPU = re.compile(r"GPU/(\S+) \((\d+)\)")
_NVLINK = re.compile(r"\+ NVL\[[\d.]+\] - (GPU|NVS)/(\S+)")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?")
_GDR = re.compile(r"NET/.+ : GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '(.*)'")
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
    """One rank's log; of several communicators the largest one's hops.

    `network` carries what goes to other hosts. `sockets` are names of interfaces. `gdr` maps an adapter to whether
    GPUDirect RDMA could be used with it. `nvls`: whether the GPU offers NVLink SHARP, which is used if `nvls_channels`
    is above 0. `hosts` is the number of hosts that NCCL counts.
    `nvlinked` lists, for each GPU of the host by rank, those to which NVLinks lead, directly or through a switch.
    `collnet` is the network that reduces by itself (SHARP), such as "SHARP/GDRDMA", if NCCL opened a path to it.
    `settings` are variables that NCCL obeyed, `notes` reasons, `warnings` its own.
    """

    version: str | None = None
    network: str | None = None
    sockets: tuple[str, ...] = ()
    gdr: dict[str, bool] = {}
    hops: tuple[Hop, ...] = ()
    nvls: bool | None = None
    nvls_channels: int | None = None
    hosts: int | None = None
    nvlinked: dict[int, tuple[int, ...]] = {}
    settings: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    collnet: str | None = None


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
    messages = list(_messages(text))
    lines = [line.message for line in messages]
    version = next((found for line in lines if (found := _VERSION.match(line))), None)
    nvls = _said(lines, r"NVLS multicast support is (not )?available")
    return Log(
        version=version[1] if version else None,
        network=_said(lines, r"Using network (.+)") or _said(lines, r"Assigned NET plugin (.+) to comm"),
        sockets=_listed(lines, r"NET/Socket : Using (.*)", r"\[\d+\]([^\s:]+):"),
        gdr={found[2]: found[1] == "Enabled" for line in lines if (found := _GDR.match(line))},
        hops=_hops(_of_the_largest(messages)),
        nvls=None if nvls is None else not nvls,
        nvls_channels=_number(_said(lines, r"\d+ coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels")),
        hosts=_number(_said(lines, r"comm \S+ rank \d+ nRanks \d+ nNodes (\d+)")),
        nvlinked=_nvlinked(lines),
        settings=_settings(lines),
        notes=_some(line for line in lines if line.startswith(_NOTES)),
        warnings=_some(line.message for line in messages if line.level == "WARN"),
        collnet=next((f"{own[1]}{own[2] or ''}" for line in lines if (own := _COLLNET.match(line))), None),
    )


class _Line(NamedTuple):
    """A line of the log; `thread` is empty where it is not written in front."""

    level: str
    message: str
    thread: str = ""


def _messages(text: str) -> Iterator[_Line]:
    for line in text.split("\n"):
        if found := _LINE.search(line):
            thread = _THREAD.search(line[: found.start()])
            yield _Line(found[1], found[2].strip(), thread[1] if thread else "")
        elif line.startswith("NCCL version"):
            yield _Line("INFO", line.strip())


def _of_the_largest(lines: Iterable[_Line]) -> list[str]:
    """The lines of the communicators with the most ranks; of other sizes, ranks have other numbers.

    A line belongs to the communicator that its thread began last, else to the one that any thread did.
    """
    begun: dict[str, int] = {}
    last = 0
    sized: list[tuple[int, str]] = []
    for line in lines:
        if (found := _BEGUN.match(line.message)) and (size := _number(found[1])) is not None:
            begun[line.thread] = last = size
        sized.append((begun.get(line.thread, last), line.message))
    # What was written before the first communicator belongs to each: NCCL up to 2.17 does not say when one begins.
    largest = max((size for size, _ in sized), default=0)
    return [message for size, message in sized if size in (0, largest)]


def _said(lines: Sequence[str], pattern: str) -> str | None:
    """The first group in the first line that starts so, empty where it took no part; None without such a line."""
    form = re.compile(pattern)
    return next((found[1] or "" for line in lines if (found := form.match(line))), None)


def _listed(lines: Sequence[str], pattern: str, item: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(item, _said(lines, pattern) or "")))


def _number(digits: str | None) -> int | None:
    # A thousand million nodes is no number of nodes.
    return int(digits) if digits and len(digits) < 10 else None


def _some(messages: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(message[:_MOST_CHARACTERS] for message in messages))[:_MOST_LINES]


def _hops(lines: Sequence[str]) -> tuple[Hop, ...]:
    # Devices by source, target, kind, name and whether it is GPUDirect RDMA.
    hops: dict[tuple[int, int, str, str, bool], set[int]] = {}
    for line in lines:
        if (found := _CHANNEL.match(line)) is None:
            continue
        source, target = _number(found[1]), _number(found[2])
        if source is None or target is None:
            continue
        path = _RCCL_END.sub("", found[3])
        kind, _, rest = path.partition("/")
        net = _NET.match(path)
        name, gdr = (net[1], "GDRDMA" in (net[3] or "")) if net else (rest.partition("/")[0], False)
        devices = hops.setdefault((source, target, kind, name, gdr), set())
        if net and (device := _number(net[2])) is not None:
            devices.add(device)
    return tuple(
        Hop(
            source=source,
            target=target,
            kind=kind,
            name=name,
            gdr=gdr,
            devices=tuple(sorted(devices)),
        )
        for (source, target, kind, name, gdr), devices in hops.items()
    )


def _nvlinked(lines: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """From NCCL's map of the host (graph/topo.cc, ncclTopoPrint): below each GPU stand its NVLinks."""
    ranks: dict[str, int] = {}
    ends: dict[int, set[tuple[str, str]]] = defaultdict(set)
    current: int | None = None
    for line in lines:
        if found := _NVLINK.search(line):
            if current is not None:
                ends[current].add((found[1], found[2]))
        elif (found := _GPU.search(line)) and (current := _number(found[2])) is not None:
            ranks[found[1]] = current
        else:
            current = None
    switched = {rank for rank, own in ends.items() if any(kind == "NVS" for kind, _ in own)}
    links: Mapping[int, set[int]] = {
        rank: {ranks[name] for kind, name in own if kind == "GPU" and name in ranks}
        | (switched if rank in switched else set())
        for rank, own in ends.items()
    }
    return {rank: tuple(sorted(own - {rank})) for rank, own in sorted(links.items()) if own - {rank}}


def _settings(lines: Sequence[str]) -> dict[str, str]:
    found = (match for line in lines if (match := _SETTING.fullmatch(line)))
    # How the log itself was asked for is no news.
    known = {row[1]: row[2][:_MOST_CHARACTERS] for row in found if is_recorded(row[1])}
    return {name: value for name, value in sorted(known.items()) if not name.startswith("NCCL_DEBUG")}
