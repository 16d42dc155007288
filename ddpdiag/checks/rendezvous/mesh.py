"""TCP between all hosts.

gloo opens a connection between every two ranks, and NCCL between many ranks. Each rank listens on a free port, so it is
not enough that a firewall opens MASTER_PORT. In this check one rank of each host listens on a free port, at the address
that the job would offer, and connects to all other hosts. Over each connection it sends a small message, then 64 KiB,
then 16 MiB to measure the rate; a host measures one rate at a time. If a link fails, is slow or loses packets, all
links are measured once more, and the better result counts. A link may also be cut during the run. So if ranks of
several hosts waited for each other in a later check, the links are tested again at the end of the run. More than 64
hosts are divided into groups of at most 64; the measurement `mesh.pairs` shows how many pairs of hosts were tested.

Failing links are explained by their pattern. If all links from and to one host fail, or all in one direction, the host
is named. Single failing links are named themselves. If links fail everywhere, no host is named, since the hosts share
the cause. With two hosts it cannot be decided which side is at fault.

Findings and their causes:

Fix: open the ephemeral ports (net.ipv4.ip_local_port_range) between the hosts, in both directions; set the same MTU;
compare `ethtool` and `ip -s link` of the named host with those of another.

Confirm by hand: Between two hosts `nc -l 45000` and `nc -vz HOST 45000` in both directions; `iperf3 -s` and `iperf3 -c
HOST` for the rate; `ping -M do -s 8972 HOST` for the MTU; `ip -s link` for errors.

Sources: NCCL user guide, networking; gloo's transport/tcp/pair.h (five times the time-out); Mathis et al., The
macroscopic behavior of the TCP congestion avoidance algorithm, 1997; RFC 2923 (path MTU black holes).
"""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from shlex import quote
from statistics import median
from typing import Any, NamedTuple

from ddpdiag.checks.api import Check, Contribution, Scope, Seen, SkipReason, Stage, new_trial, optional, scope_groups
from ddpdiag.checks.blame import find_blame
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.checks.matrix import Link, pair_matrix
from ddpdiag.checks.registry import check_by_code
from ddpdiag.checks.rendezvous.links import AT_END, Data, Mesh, Subject, failure_word, lost_share, mesh_of, usual_rate
from ddpdiag.model import Finding, Kind, Scalar, Severity, Status, Trial
from ddpdiag.model.recording import SIGNAL_EVENTS
from ddpdiag.model.trial import Context
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net import interfaces as net
from ddpdiag.probes.net.mesh import Peer, survey
from ddpdiag.probes.net.mesh_listener import CONNECT_SECONDS, LARGE_SIZE, STALL_SECONDS, Listener
from ddpdiag.probes.net.tcp_connect import Reach, allowed_ports, resolve
from ddpdiag.text import count, rate_text

FINDINGS = {
    **dict.fromkeys(
        ("refused", "dropped", "unreachable"),
        FindingSpec(
            "a firewall that rejects or drops, or no route. gloo would wait five times its time-out. Over gloo only "
            "one of two ranks connects to the other: where gloo works all the same, this is a warning."
        ),
    ),
    "silent": FindingSpec(
        "the connection is accepted, then no data arrive, or it is cut: a proxy, an overloaded host."
    ),
    "black-hole": FindingSpec.error(
        "small messages pass, large ones are lost: hosts or switches with different MTUs, and ICMP filtered."
    ),
    "slow": FindingSpec(
        "less than a third (a warning) or a tenth (an error) of what most hosts reach, and more than `noise_seconds` "
        "longer for 16 MiB (a process on a busy host may wait so long for a core); or less than a third of "
        "`expected_bytes_per_s`, a tenth of the interface's nominal speed (of which one TCP connection is expected to "
        "fill 10 Gbit/s at most), or `least_bytes_per_s` (more than 100 Mbit/s gives, and much less than 1 Gbit/s "
        "gives). Rates between containers of one machine are not compared with the network."
    ),
    "loss": FindingSpec(
        "segments had to be sent again in every repetition, more than `lost_share` and at least `lost_segments`: a bad "
        "cable or port, a policer. One of a thousand leaves 4.5 Gbit/s to a connection of 0.1 ms (Mathis et al., "
        "1997). A warning; an error from `lossy_share` (1 %) at the address that the job's library offers "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), unless NCCL takes an RDMA port. This also holds for a link that is "
        "slow."
    ),
}

# The most hosts of a group: a full mesh of more would take too long.
MAX_HOSTS = 64
# The measurement in the worker ends this time before the supervisor's deadline.
_MARGIN_SECONDS = 3.0
_NAME_SECONDS = 2.0


def measure(ctx: Context) -> Data:
    """Listen, exchange addresses with the other hosts of the group, and measure the link to each of them."""
    seconds = ctx.trial.deadline_seconds
    end = time.monotonic() + seconds - min(_MARGIN_SECONDS, seconds / 2)
    own_interfaces = net.interfaces(sys_root(os.environ)) or ()
    ctx.step("look up the own name")
    own_addresses = net.filter_own(resolve(socket.gethostname(), 0, _NAME_SECONDS) or ())
    library = str(ctx.trial.params["library"])
    offered = net.offered_address(library, net.ifnames(os.environ), own_addresses, own_interfaces)
    turn_lock = threading.Lock()
    listener = Listener(allowed_ports(ctx.options), turn_lock, end)
    answers = ctx.exchange(f"{listener.port} {listener.token} {offered or ''}")
    host_name = answers[ctx.group_rank].address
    is_one_address = offered is None or offered in (resolve(host_name, 0, _NAME_SECONDS) or ())
    local_addresses = {address for interface in own_interfaces for address in interface.addresses}
    peers = []
    for number, (rank, answer) in enumerate(zip(ctx.group, answers, strict=True)):
        port, token, address = answer.offer.split(" ")
        # An address that this host also has (docker0's) is left out: the connection would lead to this host.
        address = "" if address in local_addresses else address
        if number != ctx.group_rank:
            peer = Peer(rank=rank, number=number, offered=address, host=answer.address, port=int(port), token=token)
            peers.append(peer)
    cells = survey(peers, ctx.group_rank, listener, turn_lock, end, ctx.step, addresses=1 if is_one_address else 2)
    used_interfaces = dict.fromkeys(net.interface_of(cell.source, own_interfaces) for cell in cells)
    return Data(
        offered_address=offered,
        listener_port=listener.port,
        interfaces=tuple(interface for interface in used_interfaces if interface is not None),
        ephemeral_ports=net.ephemeral_ports(),
        cells=cells,
    )


def skip(seen: Seen[Any]) -> SkipReason | None:
    """Skip on a single host. This is no failure, even if the stage was requested."""
    return optional(None if len(seen.world.hosts) > 1 else "there is one host only")


def plan(seen: Seen[Data]) -> Sequence[Trial]:
    """Plan a measurement of the links, a second one if a link is bad, and a last one if a link may have been cut. A
    second one would show nothing new if no connection at all was accepted, so it is left out then."""
    groups = _groups([group[0] for group in scope_groups(Scope.HOST, seen.world)])
    params: dict[str, str | int | float | bool] = {"library": net.library_of(seen.world.backend)}
    if seen.is_last:
        is_due = _has_unexplained_wait(seen) and not any(trial.params.get(AT_END) for trial in seen.trials)
        return (new_trial(seen, groups=groups, params={**params, AT_END: True}),) if is_due else ()
    if not seen.trials:
        return (new_trial(seen, groups=groups, params=params),) if groups else ()
    if len(seen.trials) > 1 or not seen.succeeded(seen.trials[0]):
        return ()
    mesh = mesh_of(seen)
    cells = mesh.cells.values()
    has_failed = any(cell.offered_reach or failure_word(cell) for cell in cells)
    is_any_bad = has_failed or _missed_rates(seen, mesh) or _links_with_loss(seen, mesh)
    repetition = new_trial(seen, groups=seen.trials[0].groups, params=seen.trials[0].params)
    return (repetition,) if is_any_bad and any(cell.reach is Reach.ACCEPTED for cell in cells) else ()


def last_seconds(seen: Seen[Data]) -> float:
    """The seconds that the trial at the end may take: the longest measurement, and the time-outs of failing links."""
    longest_seconds = max((o.seconds for o in seen.outcomes if o.status is Status.DONE), default=0.0)
    return longest_seconds + CONNECT_SECONDS + STALL_SECONDS + _MARGIN_SECONDS


def _has_unexplained_wait(seen: Seen[Data]) -> bool:
    """Whether a group of several hosts failed after the last test of the links, by a hang or without a blamed rank."""
    last_test = max((trial.number for trial in seen.trials), default=0)
    for trial in seen.recording.trials:
        if trial.number <= last_test or trial.may_fail or trial.kind is not Kind.TORCH:
            continue
        outcomes = [o for o in seen.recording.outcomes if o.trial == trial.number]
        for group in trial.groups:
            blame = find_blame([o for o in outcomes if o.rank in group])
            hosts = seen.world.host_names(group)
            if blame and len(hosts) > 1 and not (blame.ranks and blame.status is not Status.HUNG):
                return True
    return False


def _groups(leaders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Divide the leaders (one rank of each host) into groups of nearly the same size; none for a single host. Hosts of
    successive ranks often share a switch, so they are put into different groups."""
    number = -(-len(leaders) // MAX_HOSTS)
    groups = tuple(tuple(leaders[start::number]) for start in range(number))
    return tuple(group for group in groups if len(group) > 1)


def report(seen: Seen[Data]) -> Contribution:
    """Contribute to the report the number of tested pairs of hosts, the lowest and the median rate of their links, and
    a table with the rate of each link (0 if no large message passed)."""
    mesh = mesh_of(seen)
    if not mesh.cells:
        return Contribution()
    rates = [cell.bytes_per_s for cell in mesh.cells.values() if cell.bytes_per_s is not None]
    host_count = len(seen.world.hosts)
    figures: dict[str, Scalar] = {
        "mesh.pairs": f"{len({frozenset(link) for link in mesh.cells})} of {host_count * (host_count - 1) // 2}",
        "mesh.min_bytes_per_s": min(rates, default=None),
        "mesh.median_bytes_per_s": median(rates) if rates else None,
    }
    host_numbers = {rank: number for number, ranks in enumerate(seen.world.hosts.values()) for rank in ranks}
    names = tuple(name for name, _ in seen.world.hosts)
    cells = {(host_numbers[a], host_numbers[b]): cell.bytes_per_s or 0.0 for (a, b), cell in mesh.cells.items()}
    matrix = pair_matrix("rdz.mesh", "One TCP connection between two hosts", names, cells)
    return Contribution(figures=figures, matrices=() if matrix is None else (matrix,))


# Each kind of failure in words: of several connections, and of the one connection that a finding shows as an example.
_FAILURE_TEXTS = {
    "refused": ("are refused", "is refused"),
    "dropped": ("get no answer", "gets no answer"),
    "unreachable": ("fail: no route to host", "fails with 'no route to host'"),
    "silent": ("carry no data", "is accepted, but no data arrive"),
    "black-hole": (
        "lose large packets",
        "carries small messages, but large packets are lost: a switch or tunnel has a smaller MTU",
    ),
}
# Sentences that a finding adds about the connections that work, by the kind of its subject.
_FIRST_HOST_REACHED = "All hosts reach ddpdiag's own port on {first}, rank 0's host, so the network works on that port."
_CONTRASTS = {
    **dict.fromkeys(("host", "sender", "receiver"), f"The other hosts reach each other. {_FIRST_HOST_REACHED}"),
    "islands": f"Inside these groups all connections work. {_FIRST_HOST_REACHED}",
}

# One TCP connection from Python is expected to fill 10 Gbit/s at most, also on a faster link.
_ONE_CONNECTION_BYTES_PER_S = 1.25e9


def judge(seen: Seen[Data]) -> Iterator[Finding]:
    mesh = mesh_of(seen)
    yield from _failed_links(seen, mesh)
    # A run that a signal ends may lack the repetition, and a rate that was measured once may only show a busy host.
    if not (any(event.kind in SIGNAL_EVENTS for event in seen.recording.events) and seen.check.plan(seen)):
        slow = _missed_rates(seen, mesh)
        yield from _slow_links(seen, mesh, slow)
        yield from _lossy_links(seen, mesh, slow.keys())


def _failed_links(seen: Seen[Data], mesh: Mesh) -> Iterator[Finding]:
    """Findings on links on which no connection works, or on which large packets are lost. If a job over gloo works,
    failed connections are only a warning: gloo connects two ranks in one direction only."""
    gloo_works = seen.world.backend == "gloo" and seen.job_backend_works
    bad = mesh.links_with(lambda cell: failure_word(cell) is not None)
    good = mesh.cells.keys() - bad
    for subject in mesh.subjects(bad, good):
        word = Counter(failure_word(cell) or "" for cell in subject.cells.values()).most_common(1)[0][0]
        (a, b), cell = next((link, cell) for link, cell in subject.cells.items() if failure_word(cell) == word)
        since = " They worked at the start of the run." if mesh.cut_links.issuperset(subject.cells) else ""
        failures = [f"{mesh.link_text(link)}: {failure_word(own)}" for link, own in subject.cells.items()]
        failure_text, example_text = _FAILURE_TEXTS[word]
        port, address = seen.by_rank[cell.peer].listener_port, cell.address or "unknown"
        contrast = _CONTRASTS.get(subject.kind, _FIRST_HOST_REACHED).format(first=seen.world.host_name(0))
        if word == "black-hole":
            contrast = ""
        elif gloo_works:
            contrast = "gloo still works: there the other side connects."
        yield seen.finding(
            word,
            f"TCP connections {subject.where} {failure_text}",
            f"{len(subject.cells)} of {len(mesh.cells)} tested TCP connections failed {subject.where}. For example "
            f"{mesh.names[a]} -> {mesh.names[b]} (address {address}, port {port}) {example_text}.{since} "
            f"{contrast} {subject.doubt}".strip(),
            severity=Severity.WARNING if gloo_works and word != "black-hole" else Severity.ERROR,
            hosts=subject.hosts,
            links=subject.links,
            evidence={"ways": [*failures[:16]]},
            fix=_fix_of_failure(seen, mesh, subject, word),
        )


class ExpectedRate(NamedTuple):
    """A rate that a link should reach, and its source in words. `can_be_error`: a rate far below it is an error."""

    bytes_per_s: float
    source: str
    can_be_error: bool


def _missed_rates(seen: Seen[Data], mesh: Mesh) -> dict[Link, ExpectedRate]:
    """The slow links, each with the expected rate that it does not reach. Links between containers of one machine are
    left out, because their rates are not compared with the network."""
    compared = {link: cell for link, cell in mesh.cells.items() if link not in mesh.within_machines}
    usual = usual_rate(compared)
    return {link: missed for link in compared if (missed := _missed_rate(seen, mesh, link, usual)) is not None}


def _links_with_loss(seen: Seen[Data], mesh: Mesh) -> frozenset[Link]:
    share, least = seen.setting("lost_share"), seen.setting("lost_segments")
    return mesh.links_with(lambda cell: lost_share(cell) > share and (cell.retransmitted or 0) >= least)


def _missed_rate(seen: Seen[Data], mesh: Mesh, link: Link, usual: float | None) -> ExpectedRate | None:
    """The first expected rate that the link clearly misses; None if it misses none or has no rate. `usual` is the rate
    that most hosts reach (None: not known). A setting of 0 expects nothing."""
    rate, ratio = mesh.cells[link].bytes_per_s, seen.setting("slow_ratio")
    wanted, least = seen.setting("expected_bytes_per_s"), seen.setting("least_bytes_per_s")
    if rate is None:
        return None
    if rate * ratio < wanted:
        return ExpectedRate(wanted, "the rate that --set RDZ004.expected_bytes_per_s gives", True)
    # A process on a busy host may wait for a core, so a delay of up to `noise_seconds` does not count.
    if usual and rate * ratio < usual and LARGE_SIZE / rate - LARGE_SIZE / usual > seen.setting("noise_seconds"):
        is_pair = len(mesh.names) == 2
        source = "what the other direction reaches" if is_pair else "what most of the other hosts reach"
        return ExpectedRate(usual, source, True)
    # The speed of the slower interface of the two ends, if the kernel reports one.
    ends = [(mesh.names[end], _interface(seen, end)) for end in link]
    speeds = [(own.bytes_per_s, f"{own.name} of {name}") for name, own in ends if own and own.bytes_per_s]
    if speeds:
        slowest, interface_text = min(speeds)
        possible = min(slowest, _ONE_CONNECTION_BYTES_PER_S)
        if rate * seen.setting("very_slow_ratio") < possible:
            return ExpectedRate(possible, f"what {interface_text} can carry", False)
    return ExpectedRate(least, "the least that a job should have", False) if rate < least else None


def _slow_links(seen: Seen[Data], mesh: Mesh, slow: Mapping[Link, ExpectedRate]) -> Iterator[Finding]:
    """Findings on the `slow` links, each of which does not reach an expected rate."""
    rated = mesh.links_with(lambda cell: cell.bytes_per_s is not None) - mesh.within_machines
    for subject in mesh.subjects(slow.keys(), rated):
        expected = max(slow[link] for link in subject.cells)
        is_very_slow = expected.can_be_error and subject.rate * seen.setting("very_slow_ratio") < expected.bytes_per_s
        lost = subject.lost_share
        lost_text = f" {100 * lost:.2g} % of the segments had to be sent again."
        yield seen.finding(
            "slow",
            f"slow network {subject.where}: {rate_text(subject.rate)}",
            f"A TCP connection {subject.where} carries only {rate_text(subject.rate)} (median of "
            f"{count(len(subject.cells), 'link')}). {rate_text(expected.bytes_per_s)} is {expected.source}."
            f"{lost_text if lost > seen.setting('lost_share') else ''} {subject.doubt}".strip(),
            severity=Severity.ERROR if is_very_slow or _loses_traffic(seen, subject) else Severity.WARNING,
            hosts=subject.hosts,
            links=subject.links,
            evidence={
                "bytes_per_s": subject.rate,
                "expected_bytes_per_s": expected.bytes_per_s,
                "source": expected.source,
                "lost_share": lost,
            },
            fix=_fix_of_bad_rate(seen, mesh, subject),
        )


def _lossy_links(seen: Seen[Data], mesh: Mesh, slow: Set[Link]) -> Iterator[Finding]:
    """Findings on links that lose packets, without the `slow` links, which have a finding of their own."""
    lossy = _links_with_loss(seen, mesh)
    counted = mesh.links_with(lambda cell: cell.segments is not None and failure_word(cell) is None)
    for subject in mesh.subjects(lossy - slow, counted - lossy):
        times = "in the measurement" if len(seen.trials) == 1 else f"in each of {len(seen.trials)} measurements"
        yield seen.finding(
            "loss",
            f"{100 * subject.lost_share:.2g} % of the packets {subject.where} are lost",
            f"{100 * subject.lost_share:.2g} % of the TCP segments {subject.where} had to be sent again, {times}. At "
            f"most {100 * seen.setting('lost_share'):g} % is expected. {subject.doubt}".strip(),
            severity=Severity.ERROR if _loses_traffic(seen, subject) else Severity.WARNING,
            hosts=subject.hosts,
            links=subject.links,
            evidence={"lost_share": subject.lost_share, "bytes_per_s": subject.rate},
            fix=_fix_of_bad_rate(seen, mesh, subject),
        )


def _loses_traffic(seen: Seen[Data], subject: Subject) -> bool:
    """Whether the median loss of the links is at least `lossy_share` in each of two measurements, at least one link was
    measured at the address that the job uses, and NCCL uses no RDMA port in place of TCP."""
    # If NCCL uses RDMA ports, which HST006 records, the job's data do not go through TCP.
    port_readings = seen.of(check_by_code("HST006")).by_rank.values() if seen.world.backend == "nccl" else ()
    uses_rdma = any(port.used_by_nccl for reading in port_readings for port in reading.ports)
    is_confirmed = subject.lost_share >= seen.setting("lossy_share") and len(seen.trials) > 1
    return is_confirmed and not uses_rdma and any(cell.offered_reach is None for cell in subject.cells.values())


def _interface(seen: Seen[Data], rank: int) -> net.Interface | None:
    """The first interface that this rank's connections used, or None if it is not known."""
    used = seen.by_rank[rank].interfaces if rank in seen.by_rank else ()
    return used[0] if used else None


_RULES = "`nft list ruleset` or `iptables -L -n` shows the rules"
_DIRECTIONS = {"host": "in both directions", "sender": "for outgoing connections", "receiver": "for the other hosts"}
_USUAL_MTU = 1500
# Headers of IPv4 and ICMP.
_HEADER_BYTES = 28


def _leave_out_text(subject: Subject) -> str:
    """The advice to leave the blamed hosts out until the fix is done; empty if no host is blamed."""
    return f" Until then {leave_out(subject.hosts)}." if subject.hosts else ""


def _fix_of_failure(seen: Seen[Data], mesh: Mesh, subject: Subject, word: str) -> str:
    """The fix for failing links. `word` is the kind of failure."""
    (a, b), cell = next(iter(subject.cells.items()))
    sender, receiver = mesh.names[a], mesh.names[b]
    hosts = names_text(subject.hosts) or "these hosts"
    match word:
        case "refused" | "dropped":
            known = (data.ephemeral_ports for data in seen.by_rank.values() if data.ephemeral_ports)
            low, high = next(known, (32768, 60999))  # else Linux's default
            ports = seen.options.port_range or f"{low}-{high}"
            where = _DIRECTIONS.get(subject.kind, "for each other")
            fewer = ""
            if not (subject.hosts or subject.links):
                fewer = (
                    " Or open fewer, for example 40000-40999: set them on every host (`sysctl -w "
                    "net.ipv4.ip_local_port_range='40000 40999'`), and run again with `--port-range 40000-40999`."
                )
            return (
                f"As root open TCP ports {ports} {where} in the firewall of {hosts} ({_RULES}).{fewer}"
                f"{_leave_out_text(subject)}"
            )
        case "unreachable":
            return (
                f"Run `ip route get {quote(cell.address or 'ADDRESS')}` on {sender} and `ip -br addr` on {receiver}. "
                "If there is no route, ask the administrator to add it. If there is one, a firewall answers in its "
                f"place: as root look at the rules of {receiver} ({_RULES}).{_leave_out_text(subject)}"
            )
        case "silent":
            return (
                f"Run `uptime` on {hosts}: an overloaded host accepts connections and does not serve them. If the load "
                "is low, ask the network administrator which proxy, load balancer or intrusion filter is between the "
                f"hosts.{_leave_out_text(subject)}"
            )
    own, other = _interface(seen, a), _interface(seen, b)
    size = (own.mtu if own and own.mtu else _USUAL_MTU) - _HEADER_BYTES
    return (
        f"Run `ping -M do -s {size} {quote(receiver)}` on {sender}, then with smaller sizes: the largest that passes, "
        f"plus {_HEADER_BYTES}, is the MTU of the path. As root set this MTU on every host (`ip link set dev "
        f"{quote(other.name if other else 'INTERFACE')} mtu MTU`), or let TCP find it (`sysctl -w "
        f"net.ipv4.tcp_mtu_probing=1`).{_leave_out_text(subject)}"
    )


def _fix_of_bad_rate(seen: Seen[Data], mesh: Mesh, subject: Subject) -> str:
    """The fix for links that are slow or lose packets: commands to run on several hosts, to compare what they print."""
    (sender, receiver), cell = next(iter(subject.cells.items()))
    if subject.kind == "links":
        return (
            f"Run `ip route get {quote(cell.address or 'ADDRESS')}` on {mesh.names[sender]}, and ask the network "
            "administrator to look at the switches and cables between these hosts."
        )
    blamed = next((rank for rank, name in mesh.names.items() if name in subject.hosts), sender)
    interface = _interface(seen, blamed)
    name = quote(interface.name if interface else "INTERFACE")
    commands = (
        f"`ethtool {name}` (Speed, Duplex), `tc qdisc show dev {name}` (shapers) and `ip -s link show {name}` (errors, "
        "dropped)"
    )
    if not subject.hosts:
        return (
            f"Run {commands} on {'both hosts' if subject.kind == 'pair' else 'the hosts'}, and compare. Ask the "
            "network administrator to look at the switches between them."
        )
    other = next((host for host in mesh.names.values() if host not in subject.hosts), mesh.names[receiver])
    return (
        f"Run {commands} on {names_text(subject.hosts)}, and compare with {other}. Ask the administrator to try "
        f"another cable and another switch port.{_leave_out_text(subject)}"
    )


SETTINGS = {
    "slow_ratio": 3.0,
    "very_slow_ratio": 10.0,
    "noise_seconds": 0.02,
    "expected_bytes_per_s": 0.0,
    "least_bytes_per_s": 30e6,
    "lost_share": 1e-3,
    "lossy_share": 1e-2,
    "lost_segments": 10.0,
}
CHECK: Check[Data] = Check(__name__, "RDZ004", "mesh", Stage.RENDEZVOUS, Scope.HOST, deadline=15)
