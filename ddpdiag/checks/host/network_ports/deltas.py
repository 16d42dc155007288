"""HST006's rules: what of a network port must not rise, or come down, while a job runs.

Each rule takes a port as it was at the beginning and at the end. A counter that fell was reset or came round (hardware
counts in 32 bits), and is no rise; one that only one of the two looks told is none either. The counters of an
InfiniBand port stop at their largest value (255 for link_downed): what comes then is not seen.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ddpdiag.probes.net.adapters import NetworkLook, PortCounters

# Each rises by one when the link is lost; carrier_changes once more when it is back.
_DOWNS = ("carrier_down_count", "carrier_changes", "link_downed")
# A peer's receiver was not ready, and the packet is sent again (NVIDIA, Understanding mlx5 Linux counters).
_NOT_READY = "rnr_nak_retry_err"
_MINUTE_SECONDS = 60.0
_HOUR_MINUTES = 60.0


class Limits(NamedTuple):
    """What is still normal, under the names of the check's settings."""

    bit_errors_per_hour: float
    recoveries_per_minute: float
    receive_errors_per_second: float
    damaged_segments: float

    def allowed(self, counter: str, seconds: float) -> float:
        """How far a counter of errors may rise in that time; a few events have no rate, so in a minute at least."""
        minutes = max(seconds / _MINUTE_SECONDS, 1.0)
        match counter:
            case "symbol_error" | "rx_crc_errors" | "rx_frame_errors":
                return self.bit_errors_per_hour / _HOUR_MINUTES * minutes
            case "link_error_recovery":
                return self.recoveries_per_minute * minutes
            case "port_rcv_errors":
                return self.receive_errors_per_second * max(seconds, 1.0)
            case "local_link_integrity_errors" | "excessive_buffer_overrun_errors":
                return 0.0
            case _:  # none that we know
                return math.inf


class Pair(NamedTuple):
    """One host's ports at the beginning and at the end, and those by which the job goes (`ways`)."""

    before: NetworkLook
    after: NetworkLook
    ways: frozenset[str]

    @property
    def seconds(self) -> float:
        """The time between."""
        return max(0.0, self.after.seconds - self.before.seconds)

    def ports(self) -> Iterator[tuple[PortCounters, PortCounters | None]]:
        """Ports that a job may use, then and now (None: gone): its ways, RDMA ports whose link was up, and what lies
        below them."""
        later = {port.name: port for port in self.after.ports}
        below = self._below()
        for port in self.before.ports:
            if port.name in self.ways or port.name in below or (port.rdma and port.up is not False):
                yield port, later.get(port.name)

    def _below(self) -> set[str]:
        known = {port.name: port for port in self.before.ports}
        found: set[str] = set()
        todo = [port for port in self.before.ports if port.name in self.ways or (port.rdma and port.up is not False)]
        while todo:
            new = set(todo.pop().below) - found
            found |= new
            todo += [known[name] for name in new if name in known]
        return found


class Rise(NamedTuple):
    """What happened to one port: `said` goes behind its name. `is_way`: the job goes by this port."""

    word: str
    port: PortCounters
    said: str
    is_way: bool
    counter: str | None = None
    before: int | None = None
    after: int | None = None

    @property
    def label(self) -> str:
        """Such as "mlx5_0:1 (PCI 0000:1b:00.0)"."""
        return f"{self.port.name}{f' (PCI {self.port.pci})' if self.port.pci else ''}"


def rises(pair: Pair, limits: Limits) -> Iterator[Rise]:
    """Everything that happened to the ports of one host."""
    for old, new in pair.ports():
        is_way = old.name in pair.ways
        if new is None:
            yield Rise("gone", old, "was there at the beginning, and is not at the end", is_way)
            continue
        yield from _lost(old, new, is_way)
        for counter, start, end in _risen(old.counters, new.counters):
            allowed = limits.allowed(counter, pair.seconds)
            said = f"{counter} rose from {start} to {end}"
            if counter == _NOT_READY:
                yield Rise("not-ready", old, said, is_way, counter, start, end)
            elif counter not in _DOWNS and end - start > allowed:
                yield Rise("link-errors", old, f"{said} (at most {allowed:g} expected)", is_way, counter, start, end)


def _lost(old: PortCounters, new: PortCounters, is_way: bool) -> Iterator[Rise]:
    """The link was lost, whether it is back or not."""
    now = {True: ", and it is up again", False: ", and it is down", None: ""}[new.up]
    found = [rise for rise in _risen(old.counters, new.counters) if rise[0] in _DOWNS]
    for counter, start, end in found:
        # Up at the beginning, which the kernel counts as a change as well.
        if counter != "carrier_changes" or old.up is not False or end - start > 1:
            yield Rise("link-down", old, f"{counter} rose from {start} to {end}{now}", is_way, counter, start, end)
    if not found and old.up and new.up is False:
        yield Rise("link-down", old, "its link was up at the beginning, and is down at the end", is_way)


def _risen(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for counter, start in old.items():
        end = new.get(counter, start)
        if end > start:
            yield counter, start, end


def damaged(pair: Pair, most: float) -> tuple[int, int] | None:
    """InCsumErrors then and now, if TCP threw away more than `most` segments as damaged."""
    start, end = (look.tcp.get("InCsumErrors") for look in (pair.before, pair.after))
    return (start, end) if start is not None and end is not None and end - start > most else None
