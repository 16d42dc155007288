"""Findings about ways between hosts that are slower than others, or than they should be, or that lose packets."""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.matrix import Way
from ddpdiag.checks.rendezvous.mesh.data import (
    Mesh,
    Subject,
    failure,
    large_seconds,
    lost_share,
    median_rate,
    usual_rate,
)
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.net.interfaces import Interface
from ddpdiag.probes.net.mesh import Cell
from ddpdiag.text import rate_text

D = TypeVar("D")

# One TCP connection from Python fills 10 Gbit/s, and a part of what is faster.
_ONE_CONNECTION_BYTES_PER_S = 1.25e9
_ADVICE = {
    "host": "Compare `ethtool` (speed, duplex) and `ip -s link` of {0} with another host; try its cable and port.",
    "sender": "Look at what {0} sends through: shapers (`tc qdisc`), `ethtool`, `ip -s link`, its cable and port.",
    "receiver": "Look at what {0} receives through: `ethtool`, `ip -s link` (drops), policers, its cable and port.",
    "links": "Look at what lies between these hosts: switches, routes (`ip route get`), cables.",
    "pair": "Compare `ethtool`, `tc qdisc` and `ip -s link` of both hosts.",
}
_ALL_ADVICE = "Compare `ethtool` with what the network should give, and name the fast one (GLOO_SOCKET_IFNAME)."


class Limits(Struct, frozen=True, kw_only=True):
    """Thresholds, under the names of the check's settings; an expectation of 0 is none."""

    slow_ratio: float
    very_slow_ratio: float
    noise_seconds: float
    expected_bytes_per_s: float
    least_bytes_per_s: float
    lost_share: float
    lost_segments: float


class Expected(NamedTuple):
    """A rate that a way falls short of, and where it comes from. `serious`: far below it is an error."""

    bytes_per_s: float
    source: str
    serious: bool


class Rates:
    """The rates of a mesh, held against what can be expected of them; `interfaces` are those in use, by rank."""

    def __init__(self, mesh: Mesh, interfaces: Mapping[int, Interface], limits: Limits) -> None:
        self._mesh = mesh
        self._interfaces = interfaces
        self._limits = limits
        between = {way: cell for way, cell in mesh.cells.items() if way not in mesh.inside}
        self._usual = usual_rate(between)
        self.short = {way: short for way in between if (short := self._short(way)) is not None}
        self.lossy = mesh.ways(self._loses)

    def _short(self, way: Way) -> Expected | None:
        """The first expectation that the way falls short of."""
        limits, rate = self._limits, self._mesh.cells[way].bytes_per_s
        if rate is None:
            return None
        if rate * limits.slow_ratio < limits.expected_bytes_per_s:
            return Expected(limits.expected_bytes_per_s, "as --set RDZ004.expected_bytes_per_s expects", True)
        if self._usual and rate * limits.slow_ratio < self._usual and self._beyond_noise(rate, self._usual):
            two = len(self._mesh.names) == 2
            source = "what the other direction reaches" if two else "what most hosts reach on their best way"
            return Expected(self._usual, source, True)
        for possible, name in self._nominal(way):
            if rate * limits.very_slow_ratio < possible:
                return Expected(possible, f"what {name} can carry", False)
        if rate < limits.least_bytes_per_s:
            return Expected(limits.least_bytes_per_s, "the least that a job should have", False)
        return None

    def _nominal(self, way: Way) -> Iterator[tuple[float, str]]:
        """What the interfaces at both ends can carry, as far as they say."""
        ends = [(self._mesh.names[end], self._interfaces.get(end)) for end in way]
        known = [(own.bytes_per_s, f"{own.name} of {name}") for name, own in ends if own and own.bytes_per_s]
        if known:
            slowest, whose = min(known)
            yield min(slowest, _ONE_CONNECTION_BYTES_PER_S), whose

    def _beyond_noise(self, rate: float, usual: float) -> bool:
        """On a busy host a process may have to wait for a core; that is no matter of the network."""
        return large_seconds(rate) - large_seconds(usual) > self._limits.noise_seconds

    def _loses(self, cell: Cell) -> bool:
        """Were segments lost in every repetition?"""
        share = lost_share(cell)
        some = (cell.retransmitted or 0) >= self._limits.lost_segments
        return share is not None and share > self._limits.lost_share and some


def slow(seen: Seen[D], mesh: Mesh, rates: Rates, limits: Limits) -> Iterator[Finding]:
    """Ways that fall short of what is expected."""
    rated = mesh.ways(lambda cell: cell.bytes_per_s is not None) - mesh.inside
    for subject in mesh.subjects(rates.short.keys(), rated):
        rate = median_rate(subject.cells.values())
        expected = max(rates.short[way] for way in subject.cells)
        very = expected.serious and rate * limits.very_slow_ratio < expected.bytes_per_s
        lost = median(lost_share(cell) or 0.0 for cell in subject.cells.values())
        again = f"; {100 * lost:.2g} % of the segments had to be sent again" if lost > limits.lost_share else ""
        yield seen.finding(
            "slow",
            f"slow network {subject.where}: {rate_text(rate)}",
            f"{rate_text(rate)} {subject.where} (median of {len(subject.cells)}), and "
            f"{rate_text(expected.bytes_per_s)} is {expected.source}{again}. {subject.doubt}".strip(),
            severity=Severity.ERROR if very else Severity.WARNING,
            nodes=subject.nodes,
            links=subject.links,
            evidence={
                "bytes_per_s": rate,
                "expected_bytes_per_s": expected.bytes_per_s,
                "source": expected.source,
                "lost_share": lost,
            },
            fix=_fix(subject),
        )


def lossy(seen: Seen[D], mesh: Mesh, rates: Rates) -> Iterator[Finding]:
    """Ways that lose packets, and are not slow already."""
    counted = mesh.ways(lambda cell: cell.segments is not None and failure(cell) is None)
    for subject in mesh.subjects(rates.lossy - rates.short.keys(), counted - rates.lossy):
        share = max(lost_share(cell) or 0.0 for cell in subject.cells.values())
        yield seen.finding(
            "loss",
            f"packets are lost {subject.where}",
            f"{100 * share:.2g} % of the segments {subject.where} had to be sent again, in every repetition. "
            f"{subject.doubt}".strip(),
            nodes=subject.nodes,
            links=subject.links,
            evidence={"lost_share": share, "bytes_per_s": median_rate(subject.cells.values())},
            fix=_fix(subject),
        )


def _fix(subject: Subject) -> str:
    return _ADVICE.get(subject.kind, _ALL_ADVICE).format(*subject.nodes)
