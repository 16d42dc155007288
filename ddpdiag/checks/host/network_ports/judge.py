"""HST006's findings: what happened to ports of which hosts, and whether they share the cause."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.host.network_ports.deltas import Pair, Rise, damaged
from ddpdiag.checks.hosts import Host, names_text
from ddpdiag.model import Finding, Scalar, Severity

D = TypeVar("D")

# So many ports are written out.
_SHOWN = 4
# And so many of the evidence's lists.
_LISTED = 16
_CABLE = (
    "Reseat or replace its cable and transceiver, then try another port of the switch; replace the card if it comes "
    "along with the host."
)


class Mishap(NamedTuple):
    """What may have happened to ports: `title` has a place for the hosts. `breaks` a job that goes by the port."""

    word: str
    title: str
    expected: str
    fix: str
    breaks: bool = False


_MISHAPS = (
    Mishap(
        "link-down",
        "a link went down during the run on {}",
        "no rise expected (NVSentinel fails any)",
        _CABLE,
        breaks=True,
    ),
    Mishap(
        "gone",
        "a network port was lost during the run on {}",
        "it should stay",
        "Look at `dmesg -T` and `lspci` there: the card fell off the bus, or somebody took it away.",
        breaks=True,
    ),
    Mishap("link-errors", "a link had errors during the run on {}", "the limits are NVSentinel's", _CABLE),
    Mishap(
        "not-ready",
        "peers of {} were not ready to receive over RDMA",
        "packets were sent again",
        "No need, unless RDMA is slow; then look at who else uses the port (storage), and at PCIe links (GPU004).",
    ),
)


def mishaps(seen: Seen[D], pairs: Mapping[Host, Pair], found: Mapping[Host, Sequence[Rise]]) -> Iterator[Finding]:
    """For each kind a finding for each host, or one that blames nobody where more than half of them are concerned."""
    for kind in _MISHAPS:
        own = {host: [rise for rise in rises if rise.word == kind.word] for host, rises in found.items()}
        concerned = {host: rises for host, rises in own.items() if rises}
        if _is_shared(len(concerned), len(pairs)):
            yield _finding(seen, kind, pairs, concerned)
        else:
            for host, rises in concerned.items():
                yield _finding(seen, kind, pairs, {host: rises})


def _is_shared(concerned: int, hosts: int) -> bool:
    """Is it so many hosts that they share the cause?"""
    return concerned > 1 and 2 * concerned > hosts


def _finding(seen: Seen[D], kind: Mishap, pairs: Mapping[Host, Pair], found: Mapping[Host, Sequence[Rise]]) -> Finding:
    names, shared = [host.name for host in found], len(found) > 1
    rises = [rise for own in found.values() for rise in own]
    breaks = kind.breaks and any(rise.is_way for rise in rises)
    lines = [f"{host.name}, within {pairs[host].seconds:.1f} s: {_text(own)}" for host, own in found.items()]
    where = f"{len(names)} of {len(pairs)} hosts" if shared else names[0]
    end = " So many hosts share the cause." if shared else ""
    begin = "Look at the switch that these hosts share, and at its log, first. " if shared else ""
    return seen.finding(
        kind.word,
        kind.title.format(where),
        f"{_some(lines)}; {kind.expected}.{end or (' This job goes by it.' if breaks else '')}",
        severity=Severity.ERROR if breaks else None,
        nodes=() if shared else names,
        evidence=_evidence(rises, max(pairs[host].seconds for host in found)),
        fix=f"{begin}{kind.fix} Look at {_command(rises[0])} and `dmesg -T` on {names_text(names)}.",
    )


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more hosts" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def _text(rises: Sequence[Rise]) -> str:
    """Port by port, such as "eth0 (PCI 0000:1b:00.0): carrier_down_count rose from 1 to 2, and it is up again"."""
    by_port: dict[str, list[str]] = defaultdict(list)
    for rise in rises:
        by_port[rise.label].append(rise.said)
    return names_text([f"{label}: {', '.join(said)}" for label, said in by_port.items()], _SHOWN)


def _evidence(rises: Sequence[Rise], seconds: float) -> dict[str, Scalar | list[Scalar]]:
    some = rises[:_LISTED]
    return {
        "ports": [rise.port.name for rise in some],
        "pci": [rise.port.pci for rise in some],
        "counters": [rise.counter for rise in some],
        "before": [rise.before for rise in some],
        "after": [rise.after for rise in some],
        "seconds": round(seconds, 3),
    }


def _command(rise: Rise) -> str:
    """What shows the port's state and counters."""
    adapter, _, number = rise.port.name.partition(":")
    if rise.port.rdma:
        return f"`ibstat {adapter} {number}`, `perfquery -C {adapter} -P {number}`"
    return f"`ethtool -S {adapter}`, `ip -s -s link show {adapter}`"


def damages(seen: Seen[D], pairs: Mapping[Host, Pair], most: float) -> Iterator[Finding]:
    """Segments that failed TCP's checksum, more than `most` on a host."""
    found = {host: rise for host, pair in pairs.items() if (rise := damaged(pair, most))}
    if not found:
        return
    names, some = [host.name for host in found], list(found.values())[:_LISTED]
    lines = [
        f"{host.name}, within {pairs[host].seconds:.1f} s: {_share(pairs[host], *rise)}" for host, rise in found.items()
    ]
    yield seen.finding(
        "damaged",
        f"TCP segments arrived damaged on {names_text(names)}",
        f"{_some(lines)}; at most {most:g} expected. Their checksum was wrong, though Ethernet drops what "
        "a cable damages: a switch, a card or a host's memory did it."
        f"{_sender([host.name for host in pairs if host not in found], len(pairs))}",
        nodes=() if _is_shared(len(found), len(pairs)) else names,
        evidence={
            "hosts": [*names[:_LISTED]],
            "before": [start for start, _ in some],
            "after": [end for _, end in some],
            "seconds": round(max(pairs[host].seconds for host in found), 3),
        },
        fix="Watch `nstat -az TcpInCsumErrors` on each host while two of them talk (iperf3), to see whose segments "
        "are damaged; try without the card's own checksums (`ethtool -K INTERFACE rx off tx off`); update the card's "
        "firmware, or replace it.",
    )


def _sender(others: Sequence[str], hosts: int) -> str:
    """The only one of several that gets whole segments may be the one whose segments are damaged."""
    return f" {others[0]} alone gets none: it may send them." if len(others) == 1 and hosts > 2 else ""


def _share(pair: Pair, start: int, end: int) -> str:
    """Such as "12 of 34,567 segments (InCsumErrors rose from 0 to 12)"."""
    before, after = pair.before.tcp.get("InSegs"), pair.after.tcp.get("InSegs")
    of = f" of {after - before:,}" if before is not None and after is not None and after > before else ""
    return f"{end - start:,}{of} segments (InCsumErrors rose from {start} to {end})"
