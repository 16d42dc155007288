"""The report's lists of hosts that the next job should leave out, and of healthy hosts."""

import re
from collections.abc import Mapping, Sequence

from msgspec import structs

from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import World
from ddpdiag.judgement.ending import ended_by_ctrl_c
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import EventKind, Finding, HostsLine, Recording, Scalar, Severity

# Findings name a link as "h1 -> h2".
_ARROW = " -> "
# A program that reads the list could take other texts for another host or several ("h[1-9]", two lines, "?").
_HOST_NAME = re.compile(r"[\w.:-]+")


def sort_hosts(world: World, recording: Recording, judged: Sequence[Judged], doubt: str) -> HostsLine:
    """The failing hosts, the healthy hosts, and the hosts that only warnings call slow.

    A host is failing if an error blames it, with --strict also if a warning does. Without --strict, a host that only a
    warning blames is in neither list. No host is healthy if an error blames no host, or if the host was not checked.
    """
    findings = [finding for own in judged for finding in own.findings]
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    warned = _warned_hosts(world, findings)
    blaming = [node for finding in errors for node in _hosts_of(world, finding)]
    failing = dict.fromkeys([*blaming, *(warned if world.options.strict else ())])
    unseen = (node for own in judged for finding in own.not_seen() for node in _hosts_of(world, finding))
    ends = (end for finding in errors for link in finding.links for end in link.split(_ARROW))
    # A host took part to the end if all its ranks did. If two hosts have the same name, both must.
    gone = world.out | {event.rank for event in recording.events if event.kind is EventKind.LEAVING}
    left_early = {name for (name, _), ranks in world.hosts.items() if not gone.isdisjoint(ranks)}
    doubtful = {*failing, *warned, *ends, *unseen, *left_early}
    why = _undecided(recording, errors, doubt)
    names = dict.fromkeys(name for name, _ in world.hosts if _HOST_NAME.fullmatch(name))
    healthy = () if why else tuple(name for name in names if name not in doubtful)
    neither = [name for name, _ in world.hosts if name not in {*failing, *healthy}]
    # After Ctrl-C the user needs no sentence about hosts in neither list.
    lacking = "" if ended_by_ctrl_c(recording) is not None else why or _neither(neither)
    codes = [skip.code for skip in recording.skips if not skip.grounds]
    untested = f"hosts are listed as healthy after the checks that ran: {', '.join(codes)} could not run"
    absent = {event.rank for event in recording.events if event.kind is EventKind.ABSENT}
    blamed = {rank for finding in errors if not finding.hosts for rank in finding.ranks}
    nowhere = sorted(blamed & absent - world.arrivals.keys())
    unknown = f"the host of {ranks_text(nowhere)} is not known, so it cannot be excluded" if nowhere else ""
    return HostsLine(
        failing=tuple(failing),
        healthy=healthy,
        # On a single host a slow rank is compared with ranks of this host, and no other host is left for the job.
        slow=slow_hosts(findings) if len(world.hosts) > 1 else {},
        notes=tuple(filter(None, (unknown, lacking, untested if healthy and codes else ""))),
    )


def slow_hosts(findings: Sequence[Finding]) -> dict[str, float]:
    """By host, the share by which warnings call it slower than most hosts; the slowest host first."""
    shares: dict[str, float] = {}
    for finding in findings:
        share = slower_share(finding)
        if finding.severity is Severity.WARNING and share is not None:
            shares |= {node: max(share, shares.get(node, 0.0)) for node in finding.hosts}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def slower_share(finding: Finding) -> float | None:
    """The share by which the host or rank of a finding is slower than usual; None if it states none."""
    share = finding.evidence.get("slower_share")
    return share if isinstance(share, float) else None


def fastest_first(hosts: HostsLine, rows: Sequence[Mapping[str, Scalar]]) -> HostsLine:
    """Sort the healthy hosts by the best rate that each reached with another host; hosts without a rate are last."""
    best: dict[Scalar, float] = {}
    for row in rows:
        rate = row.get("host_busbw_bytes_per_s")
        if isinstance(rate, int | float):
            best[row["host"]] = rate
    return structs.replace(hosts, healthy=tuple(sorted(hosts.healthy, key=lambda name: -best.get(name, 0.0))))


def leaves_of(world: World) -> dict[str, tuple[str, ...]]:
    """The hosts under each leaf switch, from the user's topology file or, without it, as the ranks report."""
    reported = {arrival.place.host: arrival.leaf for arrival in world.arrivals.values() if arrival.leaf}
    leaves: dict[str, list[str]] = {}
    for host, leaf in (world.given_leaves or reported).items():
        leaves.setdefault(leaf, []).append(host)
    return {leaf: tuple(hosts) for leaf, hosts in leaves.items()}


def _hosts_of(world: World, finding: Finding) -> tuple[str, ...]:
    return tuple(filter(_HOST_NAME.fullmatch, (*finding.hosts, *world.hosts_of(finding.ranks))))


def _warned_hosts(world: World, findings: Sequence[Finding]) -> dict[str, None]:
    """The hosts that warnings blame. Without --strict, warnings of one code about every host do not count."""
    by_code: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.severity is Severity.WARNING and not finding.of_the_run:
            by_code.setdefault(finding.code, {}).update(dict.fromkeys(_hosts_of(world, finding)))
    everyone = {name for name, _ in world.hosts}
    blamed = (hosts for hosts in by_code.values() if world.options.strict or not everyone.issubset(hosts))
    return {name: None for hosts in blamed for name in hosts}


def _undecided(recording: Recording, errors: Sequence[Finding], doubt: str) -> str:
    """The reason why no host can be listed as healthy, or an empty string."""
    if recording.end is None:
        return "no host is listed as healthy, because the recording has no end"
    if any(event.kind is EventKind.BUDGET for event in recording.events):
        return "no host is listed as healthy, because the time limit was reached before all checks ran"
    unblaming = [f for f in errors if not (f.ranks or f.hosts or f.links)]
    if unblaming:
        return f"no host is listed as healthy, because {unblaming[0].code} blames no rank or host: {unblaming[0].title}"
    if not errors and doubt:
        return "no host is listed as healthy, because not everything could be checked"
    return ""


def _neither(names: Sequence[str]) -> str:
    """The sentence about hosts that are neither in the healthy nor in the failing list; empty without any."""
    if not names:
        return ""
    are = "is" if len(names) == 1 else "are"
    why = "a warning or an error about links concerns them, ranks ended early, or not everything could be checked"
    return f"{names_text(names)} {are} listed neither as healthy nor as failing: {why}"
