"""HST006's rules: counters and states of a network port that must not change while a job runs.

Each rule takes a port as it was at the beginning and at the end. A counter that fell was reset or wrapped (hardware
counts in 32 bits), and is no rise; one that only one of the two looks has is none either. The counters of an
InfiniBand port stop at their largest value (255 for link_downed): later events are not seen.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ddpdiag.probes.net.adapters import NetworkLook, PortCounters

# Each rises by one when the link is lost; carrier_changes once more when it is back.
_DOWNS = ("carrier_down_count", "carrier_changes", "link_downed")
# A peer's receiver was not ready, and the packet is sent again (NVIDIA, Understanding mlx5 Linux counters).
_NOT_READY = "rnr_nak_retry_err"
_CABLE = (
    "Ask the administrator to reseat or replace the cable and the transceiver, then to try another port of the switch, "
    "then to replace the card."
)


class Incident(NamedTuple):
    """What may have happened to ports: `title` has a place for the hosts, `fix` for the commands that show more and for
    the hosts. `sentence` is what is expected, or what it means. `breaks` a job that goes by the port.
    """

    word: str
    title: str
    sentence: str
    fix: str
    breaks: bool = False


INCIDENTS = (
    Incident(
        "link-down",
        "a network link of {} went down during the run",
        " A link should stay up during a run.",
        f"{{commands}} on {{hosts}} show more. {_CABLE}",
        breaks=True,
    ),
    Incident(
        "gone",
        "a network port of {} disappeared during the run",
        "",
        "Run `lspci | grep -i -E 'ethernet|infiniband'` on {hosts}, and as root `dmesg -T | tail -n 100`. If the card "
        "is not listed, ask the administrator to power-cycle the host, and to replace the card if it disappears again.",
        breaks=True,
    ),
    Incident(
        "link-errors",
        "a network link of {} had errors during the run",
        " The limits are those of NVIDIA's node monitor NVSentinel.",
        f"The job can run, but a link with errors is slow and may fail. {{commands}} on {{hosts}} show more. {_CABLE}",
    ),
    Incident(
        "not-ready",
        "RDMA peers of {} were not ready to receive",
        " Another host was not ready to receive, and packets were sent again; the counter does not tell which host. "
        "Storage traffic over the same port often does "
        "this.",
        "Nothing to do unless RDMA is slow. Then move storage traffic to another port, and test the PCIe links of the "
        "GPUs on all hosts, since a slow link makes a receiver late: `ddpdiag check --select GPU004`.",
    ),
)


class Pair(NamedTuple):
    """One host's ports at the beginning and at the end, and those that the job uses."""

    before: NetworkLook
    after: NetworkLook
    job_ports: frozenset[str]

    @property
    def seconds(self) -> float:
        """The time between."""
        return max(0.0, self.after.seconds - self.before.seconds)

    def ports(self) -> Iterator[tuple[PortCounters, PortCounters | None]]:
        """Ports that a job may use, then and now (None: gone): its own, RDMA ports whose link was up, and what lies
        below them."""
        earlier, later = ({port.name: port for port in look.ports} for look in (self.before, self.after))
        used = {
            name for name, port in earlier.items() if name in self.job_ports or (port.rdma and port.up is not False)
        }
        todo = list(used)
        while todo:
            below = set(earlier[todo.pop()].below) - used
            todo += below & earlier.keys()
            used |= below
        yield from ((port, later.get(name)) for name, port in earlier.items() if name in used)


class CounterDelta(NamedTuple):
    """What happened to one port: `said` is a clause that names it. `used_by_job`: the job uses this port."""

    word: str
    port: PortCounters
    said: str
    used_by_job: bool
    counter: str | None = None
    before: int | None = None
    after: int | None = None


def _label(port: PortCounters) -> str:
    """Such as "mlx5_0:1 (PCI 0000:1b:00.0)"."""
    return f"{port.name}{f' (PCI {port.pci})' if port.pci else ''}"


def counter_deltas(pair: Pair, allowed: Callable[[str, float], float]) -> Iterator[CounterDelta]:
    """Everything that happened to the ports of one host; `allowed`: how far a counter may rise in so many seconds."""
    for old, new in pair.ports():
        used = old.name in pair.job_ports
        if new is None:
            said = f"{_label(old)} disappeared: it was present at the beginning and is missing at the end"
            yield CounterDelta("gone", old, said, used)
            continue
        yield from _lost(old, new, used=used)
        for counter, start, end in _risen(old.counters, new.counters):
            most = allowed(counter, pair.seconds)
            said = f"{counter} of {_label(old)} rose from {start} to {end}"
            if counter == _NOT_READY:
                yield CounterDelta("not-ready", old, said, used, counter, start, end)
            elif counter not in _DOWNS and end - start > most:
                said += f" (at most {most:g} expected)"
                yield CounterDelta("link-errors", old, said, used, counter, start, end)


def _lost(old: PortCounters, new: PortCounters, *, used: bool) -> Iterator[CounterDelta]:
    """The link was lost, whether it is back or not."""
    now = {True: " and is up again", False: " and is still down", None: ""}[new.up]
    found = [delta for delta in _risen(old.counters, new.counters) if delta[0] in _DOWNS]
    for counter, start, end in found:
        # Up at the beginning, which the kernel counts as a change as well.
        if counter != "carrier_changes" or old.up is not False or end - start > 1:
            said = f"{counter} of {_label(old)} rose from {start} to {end}: its link was lost{now}"
            yield CounterDelta("link-down", old, said, used, counter, start, end)
    if not found and old.up and new.up is False:
        said = f"the link of {_label(old)} was up at the beginning and is down at the end"
        yield CounterDelta("link-down", old, said, used)


def _risen(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for counter, start in old.items():
        end = new.get(counter, start)
        if end > start:
            yield counter, start, end
