"""The report's lists of failing hosts, which the next job should leave out, and of healthy and slow hosts."""

import re
from collections.abc import Mapping, Sequence

from msgspec import structs

from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import World
from ddpdiag.judgement.check_judgements import Judgements, slower_share
from ddpdiag.judgement.ending import ctrl_c_seconds
from ddpdiag.model import EventKind, Finding, HostLists, Recording, Scalar, Severity

# Findings name a link as "h1 -> h2".
_ARROW = " -> "
# Programs read the lists. Another text could mean several hosts or none to them ("h[1-9]", two lines, "?").
_HOST_NAME = re.compile(r"[\w.:-]+")


def sort_hosts(world: World, recording: Recording, judgements: Judgements, doubt: str) -> HostLists:
    """Sort the hosts into failing, healthy and slow ones.

    A host is failing if an error blames it, or with --strict a warning. Without --strict, a host that only warnings
    blame is neither failing nor healthy. A host that was not checked is not healthy. If an error blames no rank, host
    or link, no host is healthy.
    """
    findings = [finding for each in judgements for finding in each.findings]
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    warned_hosts = _warned_hosts(world, findings)
    blamed = [host for finding in errors for host in _hosts_of(world, finding)]
    failing = dict.fromkeys([*blamed, *(warned_hosts if world.options.strict else ())])
    unchecked = (
        host for each in judgements for finding in each.unchecked_findings() for host in _hosts_of(world, finding)
    )
    link_ends = (end for finding in errors for link in finding.links for end in link.split(_ARROW))
    # A host took part to the end if all its ranks did. If two hosts have the same name, the ranks of both must.
    ended_ranks = world.inactive_ranks | {event.rank for event in recording.events if event.kind is EventKind.LEAVING}
    ended_early = {name for (name, _), ranks in world.hosts.items() if not ended_ranks.isdisjoint(ranks)}
    not_healthy = {*failing, *warned_hosts, *link_ends, *unchecked, *ended_early}
    reason = _why_none_healthy(recording, errors, doubt)
    names = dict.fromkeys(name for name, _ in world.hosts if _HOST_NAME.fullmatch(name))
    healthy = () if reason else tuple(name for name in names if name not in not_healthy)
    unlisted = [name for name, _ in world.hosts if name not in {*failing, *healthy}]
    # After Ctrl-C the user needs no sentence about hosts in neither list.
    unlisted_text = "" if ctrl_c_seconds(recording) is not None else reason or _unlisted_text(unlisted)
    skipped_codes = [skip.code for skip in recording.skips if not skip.is_inapplicable]
    untested_text = f"hosts are listed as healthy after the checks that ran: {', '.join(skipped_codes)} could not run"
    absent_ranks = {event.rank for event in recording.events if event.kind is EventKind.ABSENT}
    blamed_ranks = {rank for finding in errors if not finding.hosts for rank in finding.ranks}
    without_host = sorted(blamed_ranks & absent_ranks - world.arrivals.keys())
    unknown = f"the host of {ranks_text(without_host)} is not known, so it cannot be excluded" if without_host else ""
    return HostLists(
        failing=tuple(failing),
        healthy=healthy,
        # On a single host a slow rank is compared with ranks of this host, and no other host is left for the job.
        slow=slow_hosts(findings) if len(world.hosts) > 1 else {},
        caveats=tuple(filter(None, (unknown, unlisted_text, untested_text if healthy and skipped_codes else ""))),
    )


def slow_hosts(findings: Sequence[Finding]) -> dict[str, float]:
    """For each slow host, the share by which it is slower than most hosts, from warnings. The slowest host is first."""
    shares: dict[str, float] = {}
    for finding in findings:
        share = slower_share(finding)
        if finding.severity is Severity.WARNING and share is not None:
            shares |= {host: max(share, shares.get(host, 0.0)) for host in finding.hosts}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def fastest_first(hosts: HostLists, rows: Sequence[Mapping[str, Scalar]]) -> HostLists:
    """Sort the healthy hosts by the best rate that each reached with another host; hosts without a rate are last."""
    rate_by_host: dict[Scalar, float] = {}
    for row in rows:
        rate = row.get("host_busbw_bytes_per_s")
        if isinstance(rate, int | float):
            rate_by_host[row["host"]] = rate
    return structs.replace(hosts, healthy=tuple(sorted(hosts.healthy, key=lambda name: -rate_by_host.get(name, 0.0))))


def leaves_of(world: World) -> dict[str, tuple[str, ...]]:
    """The hosts under each leaf switch, from the user's topology file or, without a file, as the ranks report it."""
    reported_leaves = {
        arrival.place.host: arrival.leaf_switch for arrival in world.arrivals.values() if arrival.leaf_switch
    }
    leaves: dict[str, list[str]] = {}
    for host, leaf in (world.leaf_by_host or reported_leaves).items():
        leaves.setdefault(leaf, []).append(host)
    return {leaf: tuple(hosts) for leaf, hosts in leaves.items()}


def _hosts_of(world: World, finding: Finding) -> tuple[str, ...]:
    return tuple(filter(_HOST_NAME.fullmatch, (*finding.hosts, *world.host_names(finding.ranks))))


def _warned_hosts(world: World, findings: Sequence[Finding]) -> dict[str, None]:
    """The hosts that warnings blame. Without --strict, warnings are ignored if those of one code blame all hosts."""
    by_code: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.severity is Severity.WARNING and not finding.is_about_run:
            by_code.setdefault(finding.code, {}).update(dict.fromkeys(_hosts_of(world, finding)))
    all_hosts = {name for name, _ in world.hosts}
    groups = (hosts for hosts in by_code.values() if world.options.strict or not all_hosts.issubset(hosts))
    return {name: None for hosts in groups for name in hosts}


def _why_none_healthy(recording: Recording, errors: Sequence[Finding], doubt: str) -> str:
    """The reason why no host can be listed as healthy, or an empty string."""
    if recording.end is None:
        return "no host is listed as healthy, because the recording has no end"
    if any(event.kind is EventKind.BUDGET for event in recording.events):
        return "no host is listed as healthy, because the time limit was reached before all checks ran"
    error = next((f for f in errors if not (f.ranks or f.hosts or f.links)), None)
    if error is not None:
        return f"no host is listed as healthy, because {error.code} blames no rank or host: {error.title}"
    if not errors and doubt:
        return "no host is listed as healthy, because not everything could be checked"
    return ""


def _unlisted_text(names: Sequence[str]) -> str:
    """The sentence about hosts that are neither in the healthy nor in the failing list; empty without such hosts."""
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    why = "a warning or an error about links concerns them, ranks ended early, or not everything could be checked"
    return f"{names_text(names)} {verb} listed neither as healthy nor as failing: {why}"
