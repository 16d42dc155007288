"""Every rank stayed to the end.

A rank's supervisor joined and then stopped sending messages: it was killed (SIGKILL, the memory limit), stopped, its
host went down, or the network between it and the rank that reports was cut. Launchers kill the remaining processes as
soon as one has ended, so ranks that reported a signal are not blamed; a rank that ended without a message is.

All ranks of a host that stopped responding together are one finding. If the host still answers a plain TCP connect,
only its processes ended: the host and the network path to it are healthy.

Findings and their causes:

When rank 0 itself is lost, the others say so. With `--shared-dir`, `ddpdiag judge DIRECTORY` makes the report.

Fix: look for the out-of-memory killer (`dmesg | grep -i oom`) and for the job's limits on that host; check that the
host is up, and its cables and ports.

Confirm by hand: `sinfo -R`, `scontrol show node HOST`, `ping HOST`; on the host `dmesg -T | tail -50` and `last -x
reboot`.

Sources: proc_pid_stat(5); control groups v2, memory.events; torch/distributed/elastic/multiprocessing/api.py (SIGTERM
to all as soon as one fails).
"""

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import NamedTuple

from ddpdiag.checks.api import Check, Contribution, MovedFinding, Nothing, Scope, Seen, Stage
from ddpdiag.checks.findings import FindingSpec
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text
from ddpdiag.model import Event, EventKind, Finding, Severity, Status
from ddpdiag.text import begun

FINDINGS = {
    "lost": FindingSpec.error("a rank, or all ranks of a host, stopped responding."),
    "cut-off": FindingSpec.error(
        "all other hosts, two or more, stopped responding at once, and none answers a TCP connect. The one cause that "
        "explains this is on the side of the host that reports, so that host is blamed and not all the others."
    ),
    "link": FindingSpec.error(
        "two hosts do not receive each other's messages. The evidence of two hosts cannot decide which is at fault: "
        "the link is named."
    ),
}

# Losses within this time count as one. Rank 0 sends a heartbeat each second, the other ranks notice its loss 2 s later
# than rank 0 notices theirs, and they wait 2.5 s for each other.
_TOGETHER_SECONDS = 6.0
# Sentences that say whether the lost host answers a TCP connect (None: not known).
_ANSWER_TEXTS = {
    True: " {host} itself still answers a TCP connect, so only its processes ended.",
    False: " {host} itself does not answer a TCP connect.",
    None: "",
}


class Loss(NamedTuple):
    """The lost ranks of the host `name`. `events` has the event of each lost rank. `is_whole` says whether all ranks of
    the host were lost at about the same time."""

    name: str
    events: Mapping[int, Event]
    is_whole: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.events))

    @property
    def first_seconds(self) -> float:
        """The seconds from the start of the run until the first loss was noticed."""
        return min(event.seconds for event in self.events.values())

    @property
    def host_answers(self) -> bool | None:
        """Whether the host answered a TCP connect after a loss; None if no connect was tried."""
        answers = {event.host_answered for event in self.events.values()}
        return True in answers or (False if False in answers else None)


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each lost host and for each rank that was lost alone. If all hosts but the one that reports were
    lost at once, one finding for their common cause."""
    losses = _losses(seen)
    # The rank that reports losses is rank 0 or, if rank 0 was lost, the lowest rank that recorded this loss.
    reporter = min((e.reporter for e in seen.recording.events if e.reporter is not None), default=0)
    arrival = seen.world.arrivals.get(reporter)
    reporting = arrival.host if arrival else None
    others = [host for host in seen.world.hosts if host != reporting]
    unreachable = [losses[h] for h in others if h in losses and losses[h].is_whole and not losses[h].host_answers]
    are_all_lost = bool(others) and len(unreachable) == len(others)
    if reporting and are_all_lost and _are_simultaneous([loss.first_seconds for loss in unreachable]):
        yield _all_others_unreachable(seen, reporting[0], reporter, unreachable)
        losses = {host: loss for host, loss in losses.items() if host not in others}
    for loss in losses.values():
        for ranks in [loss.ranks] if loss.is_whole else [(rank,) for rank in loss.ranks]:
            first = min((loss.events[rank] for rank in ranks), key=lambda event: event.seconds)
            who, together = f"{ranks_text(ranks)} on {loss.name}", " together" if len(ranks) > 1 else ""
            yield seen.finding(
                "lost",
                f"host {loss.name} was lost with {ranks_text(ranks)}" if together else f"{who} was lost",
                f"{begun(who)} joined and then stopped responding{together}: {first.detail}. This was noticed "
                f"{first.seconds:.1f} s after the start of the run."
                + _ANSWER_TEXTS[loss.host_answers].format(host=loss.name),
                ranks=ranks,
                evidence={"seconds": round(first.seconds, 1)},
                fix=_fix(loss),
            )


def _losses(seen: Seen[Nothing]) -> dict[tuple[str, str], Loss]:
    """The losses by host. A rank's first event counts, unless a later one adds whether its host answered a connect."""
    events: dict[int, Event] = {}
    for event in seen.recording.events:
        if event.kind is EventKind.LOST and event.rank is not None:
            known = events.setdefault(event.rank, event)
            if event.host_answered is not None and not known.host_answered:
                events[event.rank] = event
    hosts = dict(seen.world.hosts)
    for rank in events.keys() - seen.world.arrivals.keys():  # a single rank's own recording does not know the others
        hosts["?", str(rank)] = (rank,)
    losses = {}
    for (name, boot), ranks in hosts.items():
        lost = {rank: events[rank] for rank in ranks if rank in events}
        is_whole = len(lost) == len(ranks) and _are_simultaneous([event.seconds for event in lost.values()])
        if lost:
            losses[name, boot] = Loss(name, lost, is_whole)
    return losses


def _are_simultaneous(seconds: Sequence[float]) -> bool:
    return max(seconds) - min(seconds) <= _TOGETHER_SECONDS


def _all_others_unreachable(seen: Seen[Nothing], host: str, reporter: int, losses: Sequence[Loss]) -> Finding:
    """The finding if no other host answers `host`, the host of the rank `reporter` that reports the `losses`. It blames
    `host` or, if there is only one other host, the link between them."""
    names, seconds = [loss.name for loss in losses], min(loss.first_seconds for loss in losses)
    if len(losses) == 1:
        (other,) = names
        return seen.finding(
            "link",
            f"{host} and {other} lost contact with each other",
            f"{seconds:.1f} s after the start {host} received no more messages from {ranks_text(losses[0].ranks)} on "
            f"{other}, and a TCP connect from {host} to {other} fails. With only two hosts it cannot be decided "
            f"whether {host}, {other} or the link between them failed.",
            links=[f"{host} -> {other}", f"{other} -> {host}"],
            evidence={"seconds": round(seconds, 1)},
            fix=f"Check that {other} is up (`ping {quote(other)}`), then run `ip -br link` and `dmesg -T` on both "
            "hosts. A run with a third host shows which one is at fault.",
        )
    return seen.finding(
        "cut-off",
        f"{host} was cut off from all other hosts",
        f"{seconds:.1f} s after the start rank {reporter} on {host} received no more messages from any "
        f"of the {len(names)} other hosts ({names_text(names)}), and TCP connects from {host} to all of them fail. "
        f"All failing connections have {host} in common.",
        ranks=[r for r, place in seen.world.places.items() if place.host == host],
        hosts=[host],
        evidence={"hosts": len(names), "seconds": round(seconds, 1)},
        fix=f"On {host} run `ip -br link`, `ip route` and `dmesg -T`, and check its firewall (`nft list ruleset`, as "
        f"root). Otherwise {leave_out([host])}, and have its cable and switch port checked.",
    )


def _fix(loss: Loss) -> str:
    """The steps to check the host and its network if it does not answer a TCP connect, else to check its processes."""
    if loss.host_answers is False:
        return (
            f"Check that {loss.name} is up (`ping {quote(loss.name)}`), and its network there (`ip -br link`, `dmesg "
            f"-T`). Otherwise {leave_out([loss.name])}."
        )
    return (
        f"On {loss.name} run `dmesg -T | grep -i -E 'oom|killed|segfault'` for a killed process, and `ps -eo "
        "pid,stat,cmd` for a stopped one (state T). Then read the output of the ranks on this host."
    )


def report(seen: Seen[Nothing]) -> Contribution:
    """Show the worst finding under the checks during which ranks were lost."""
    lost = {event.rank for event in seen.recording.events if event.kind is EventKind.LOST}
    codes = dict.fromkeys(o.code for o in seen.recording.outcomes if o.status is Status.UNHEARD and o.rank in lost)
    worst = min(seen.findings, key=lambda finding: tuple(Severity).index(finding.severity), default=None)
    return Contribution(moved_findings=tuple(MovedFinding(code, worst) for code in codes if worst is not None))


CHECK: Check[Nothing] = Check(__name__, "RUN002", "presence", Stage.RUN, Scope.WORLD)
