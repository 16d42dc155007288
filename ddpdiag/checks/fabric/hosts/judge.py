"""The findings of the search among hosts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.congestion import usual_of
from ddpdiag.checks.fabric.hosts.data import FabricState
from ddpdiag.checks.fabric.notes import Bad, Congested, Diagnosis, Path, Reached, Systemic, slower_share
from ddpdiag.checks.fabric.rules import Bar
from ddpdiag.checks.fabric.search import Alone, Located
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text
from ddpdiag.model import EventKind, Finding, Scalar, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import begun, count, rate_text, share_text

D = TypeVar("D")

_SHOWN = 8
WHYS = {
    "hung": "did not end in time",
    "died": "crashed",
    "raised": "failed",
    "wrong": "gave wrong values",
    "unheard": "gave no result",
    "lost": "lost contact",
    "skipped": "was ended early",
}
_SLOW_TOGETHER = (
    " The rate of all together is from one test: other traffic may have slowed it down, or the network between many "
    "hosts is slower than between two."
)
# A shared part, by whether it is slow in quiet rounds as well.
_CONGESTED = (
    "They share a part of the network that is overloaded; no host is at fault.",
    "They share a part of the network that is slow even then; no host is blamed.",
)
_RUN_AGAIN = (
    "Run it again. If all together are slow again, ask the network team about the uplinks of the leaf switches, and "
    "try NCCL_ALGO=Ring or NCCL_ALGO=Tree."
)


def findings(seen: Seen[D], fabric: FabricState) -> Iterator[Finding]:
    """Each thing to blame, or why none is; then the smallest slowdown that this run could find."""
    if not seen.trials:
        return
    state, names = fabric.state, fabric.fleet.names
    if not isinstance(state, Located):
        when, fix = truncation_of(seen)
        yield seen.finding(
            "unmeasured",
            "the search for a slow host was not completed",
            f"It ended after {count(len(fabric.answers), 'round')}, {when}. A slow or failing host may be missing from "
            "this report.",
            fix=fix,
            of_the_run=True,
        )
        return
    found = state.diagnosis
    yield from _topology(seen, fabric)
    # What explains many hosts comes before single ones: the first of the errors is what the verdict names.
    for domain, units in found.domains:
        own = [names[unit] for unit in units]
        yield seen.finding(
            "domain",
            f"{domain} is at fault: {len(own)} of its hosts are slow or fail with every partner",
            f"{len(own)} hosts of {domain} are slow or fail with every partner ({names_text(own, _SHOWN)}). So many at "
            "once point to the leaf switch or rack that they share, not to each host.",
            nodes=own,
            evidence={"domain": str(domain)},
            fix="Leave these hosts out of the job (`ddpdiag check --write-failing-hosts FILE` lists them). Ask the "
            f"network team to check the switch, power and cooling of {domain}.",
        )
    for alone in state.alone:
        yield _alone(seen, fabric, alone)
    if found.systemic:
        yield _systemic(seen, fabric, found.systemic, found.bar)
        return
    for part in found.congested:
        yield _congested(seen, fabric, part, found.bar)
    in_domains = {unit for _, units in found.domains for unit in units}
    yield from (_node(seen, fabric, bad, found.bar) for bad in found.bad if bad.unit not in in_domains)
    yield from (_path(seen, fabric, path, found.bar.usual) for path in found.paths)
    if found.transients or found.unrepeated:
        yield _transient(seen, fabric, found)
    yield from _of_all(seen, fabric, state)


def _congested(seen: Seen[D], fabric: FabricState, part: Congested, bar: Bar) -> Finding:
    """A part of the fabric that slows down several hosts, with the hosts behind it."""
    units = fabric.of_domain(part.domain) or part.units
    names = [[fabric.fleet.names[unit] for unit in side] for side in part.sides or (units,)]
    where = f"between {' and '.join(map(_side, names))}" if part.sides else f"behind {_side(names[0])}"
    loaded, quiet = usual_of(part.loaded), usual_of(part.quiet)
    in_quiet = quiet is not None and quiet < bar.least
    rate = "not measured" if quiet is None else f"{rate_text(quiet)} busbw"
    known = f"{part.domain}: " if part.domain is not None else ""
    pairs = f"Pairs of one of these {len(part.units)} hosts with another host"
    if part.sides:
        pairs = "Pairs with one host of each group" if len(part.sides) > 1 else "The slow pairs of these hosts"
    serious = severity(part.quiet, bar.usual, seen.number("error_share"))
    return seen.finding(
        "congested",
        f"{known}the network {where} is {'slow' if in_quiet else 'slow while other hosts communicate'}",
        f"{pairs} usually reach {rate_text(loaded or 0.0)} busbw while other hosts communicate, and {rate} while they "
        f"do not. Other pairs reach {rate_text(bar.usual)}. {_CONGESTED[in_quiet]}",
        severity=serious if in_quiet else Severity.WARNING,
        nodes=(),
        evidence={
            "hosts": [fabric.fleet.names[unit] for unit in units],
            "sides": [" ".join(side) for side in names] if part.sides else [],
            "domain": str(part.domain) if part.domain is not None else None,
            "loaded_bytes_per_s": loaded,
            "quiet_bytes_per_s": quiet,
            "usual_bytes_per_s": bar.usual,
        },
        fix="Ask the network team what these hosts share (leaf switch, uplinks), and for its load from other jobs, "
        "links that are down, and counters of drops, ECN marks and PFC pauses. No host needs to be replaced.",
    )


def _side(names: Sequence[str]) -> str:
    return names_text(names) if len(names) <= _SHOWN else f"{len(names)} hosts ({names_text(names, 3)})"


def _alone(seen: Seen[D], fabric: FabricState, alone: Alone) -> Finding:
    name, ranks = fabric.fleet.names[alone.unit], fabric.fleet.ranks[alone.unit]
    return seen.finding(
        "alone",
        f"{name} {'fails' if slower_share(alone.tests, alone.usual) is None else 'is slow'} when tested alone",
        f"{name} was tested alone {count(len(alone.tests), 'time')}, by an all-reduce among its "
        f"{count(len(ranks), 'rank')}. "
        f"Test by test: {tests_text(alone.tests)}."
        + (f" Other hosts usually reach {rate_text(alone.usual)} busbw." if alone.usual else ""),
        severity=severity(alone.tests, alone.usual, seen.number("error_share")),
        nodes=(name,),
        evidence=measured(alone.tests, alone.usual),
        fix=f"{begun(leave_out([name]))}. Then run `ddpdiag check` on {name} alone: it tests clocks, memory, GPUs and "
        "other users there.",
    )


def _node(seen: Seen[D], fabric: FabricState, bad: Bad, bar: Bar) -> Finding:
    name, *partners = (fabric.fleet.names[unit] for unit in (bad.unit, *bad.partners))
    others = tuple(dict.fromkeys(partners))
    too = ", also while other hosts do not communicate" if bad.quiet else ""
    return seen.finding(
        "node",
        f"{name} {compared(bad.tests, bar.usual, 'hosts')}",
        f"{name} {how(bad.tests, bar.usual)} with each of {count(len(others), 'partner')} "
        f"({names_text(others, _SHOWN)}){too}: {tests_text(bad.tests)}. Pairs of hosts usually reach "
        f"{rate_text(bar.usual)} busbw, and these partners reach it with others.",
        severity=severity(bad.tests, bar.usual, seen.number("error_share")),
        nodes=(name,),
        evidence={
            "partners": [*partners[:_SHOWN]],
            **measured(bad.tests, bar.usual),
            "least_bytes_per_s": bar.least,
            "quiet_bytes_per_s": rates(bad.quiet),
        },
        fix=f"{begun(leave_out([name]))}. Then compare its network links with another host's (`ethtool INTERFACE`, "
        f"`ibstat`), and run `ddpdiag check` on {name} alone.",
    )


def measured(tests: Sequence[Reached], usual: float) -> dict[str, Scalar | list[Scalar]]:
    """For the evidence; with the share by which it is slower, where it is slow and no more."""
    slower = {} if (share := slower_share(tests, usual)) is None else {"slower_share": share}
    return {"rates_bytes_per_s": rates(tests), "usual_bytes_per_s": usual, **slower}


def _path(seen: Seen[D], fabric: FabricState, path: Path, usual: float) -> Finding:
    one, other = (fabric.fleet.names[unit] for unit in path.pair)
    tests = path.tests
    return seen.finding(
        "path",
        path_title(f"{one} and {other}", tests, usual),
        f"{one} and {other} {how(tests, usual, several=True)} with each other in {count(len(tests), 'test')}: "
        f"{tests_text(tests)}. Each of them passes with other partners ({rate_text(usual)} busbw), so the network path "
        "between the two is at fault, not a host.",
        nodes=(),
        links=(f"{one} -> {other}", f"{other} -> {one}"),
        evidence={"rates_bytes_per_s": rates(tests), "usual_bytes_per_s": usual},
        fix=f"Ask the network team about switches and cables between {one} and {other}. Until then "
        f"{leave_out([other])}.",
    )


def _systemic(seen: Seen[D], fabric: FabricState, systemic: Systemic, bar: Bar) -> Finding:
    if len(fabric.units) <= 2:
        return seen.finding(
            "undecided",
            "two hosts are slow or fail together; which one is at fault is not known",
            f"The all-reduce between {' and '.join(fabric.fleet.names[:2])} is too slow, or does not end: "
            f"{systemic.reason}.",
            fix="Run again with a third host; the pairs with it show which of the two is at fault.",
        )
    return seen.finding(
        "systemic",
        "most pairs of hosts are slow or fail: no host is blamed",
        f"{begun(systemic.reason)}; their median is {rate_text(bar.usual)} busbw. So many failures have a cause "
        "that the hosts share, such as a setting, the wrong interface, a fallback to TCP sockets, or a switch.",
        severity=Severity.ERROR if systemic.too_slow or bar.usual < bar.least else Severity.WARNING,
        evidence={"usual_bytes_per_s": bar.usual},
        fix="Run `ddpdiag check --select RDZ003,P2P004`, which shows the interface and the transport in use. Set "
        "NCCL_SOCKET_IFNAME (gloo: GLOO_SOCKET_IFNAME) or NCCL_IB_HCA to the fast network, then run again.",
    )


def _transient(seen: Seen[D], fabric: FabricState, found: Diagnosis) -> Finding:
    names = fabric.fleet.names
    told = [f"{names[path.pair[0]]} - {names[path.pair[1]]}" for path in (*found.transients, *found.unrepeated)]
    again = [f"{len(found.transients)} passed when repeated"] if found.transients else []
    once = [f"{few} not repeated often enough"] if (few := len(found.unrepeated)) else []
    return seen.finding(
        "transient",
        "some pairs of hosts failed for a short time",
        f"{names_text(told, _SHOWN)} failed although both hosts pass with others: {', '.join(again + once)}.",
        evidence={"pairs": [*told]},
        fix="Nothing to do now. If they fail again in the next run, ask the network team about the path between them.",
    )


def _of_all(seen: Seen[D], fabric: FabricState, state: Located) -> Iterator[Finding]:
    """What pairs do not show or did not decide; if they did, that no other host is slow."""
    found, proof = state.diagnosis, state.proof
    if open_ones := [fabric.fleet.names[unit] for unit in found.open]:
        yield seen.finding(
            "undecided",
            "the only two hosts of a leaf are slow; whether they or the leaf is at fault is not known",
            f"{names_text(open_ones, _SHOWN)} are slow in {count(found.rounds, 'round')}. No other host of this run is "
            "behind the same leaf switch, so either these hosts are slow or the switch is.",
            evidence={"hosts": [*open_ones]},
            fix="Run again with a third host behind that switch; it shows whether the hosts or the switch are slow.",
        )
    if proof is not None and proof.rate is None and proof.why != "lost":  # RUN002 names the lost
        yield seen.finding(
            "unproven",
            "hosts that pass in pairs fail all together",
            f"The all-reduce over all {len(found.cleared)} healthy hosts {WHYS.get(proof.why, 'failed')}, although "
            "each of them passes in pairs. The cause appears in large groups only, such as a limit of open files "
            "(`ulimit -n`), too little memory, or a switch.",
            fix="Run again with half of the hosts, to find the number of hosts at which it fails. RUN003 of this "
            "report has the step at which the ranks stopped.",
        )
    if open_ones:
        return
    behind = {unit for part in found.congested for unit in part.units} - found.cleared
    bad = {alone.unit for alone in state.alone} | {own.unit for own in found.bad} | behind
    proven = proof.rate if proof is not None else None
    rate = f", {rate_text(proven)} busbw all together" if proven else ""
    # The proof is one test, and its ring goes over more switches than a pair: no host is blamed for it.
    slow = bool(proven and proven < found.bar.least)
    seen_from = "With only two hosts a slowdown of one of them cannot be found: there is no third one to compare with."
    if len(fabric.units) > 2:
        seen_from = (
            f"A host that is {share_text(found.found_from)} slower would have been found with a probability of 99 %."
        )
    yield seen.finding(
        "clear",
        ("no further host is slow or fails" if bad else "no host is slow or fails")
        + (" in pairs, but all together are slow" if slow else ""),
        f"{count(len(fabric.units) - len(bad), 'other host' if bad else 'host')} in {count(found.rounds, 'round')} of "
        f"pairs: usually {rate_text(found.bar.usual)} busbw{rate}. {seen_from}" + (_SLOW_TOGETHER if slow else ""),
        fix=_RUN_AGAIN if slow else "",
    )


def _topology(seen: Seen[D], fabric: FabricState) -> Iterator[Finding]:
    """A file that names other hosts than these would be without effect, unnoticed."""
    names, known = fabric.fleet.names, fabric.given_domains
    missing = [name for unit, name in enumerate(names) if unit not in known]
    if not seen.options.topology or not missing:
        return
    yield seen.finding(
        "topology",
        f"--topology names {len(known)} of {len(names)} hosts",
        f"The file does not name {names_text(missing, _SHOWN)}. Each of these hosts was tested as if it had a leaf "
        "switch of its own."
        if known
        else f"The file names none of the hosts of this run ({names_text(missing, _SHOWN)}), so it was not used.",
        evidence={"hosts": [*missing]},
        fix="Add these hosts to the file, with their names as in this report.",
    )


def severity(tests: Sequence[Reached], usual: float, error_share: float) -> Severity:
    """An error where it does not end, or is far below at its best; else it slows the job down."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    bad = len(known) < len(tests) or max(known, default=0.0) < error_share * usual
    return Severity.ERROR if bad else Severity.WARNING


def how(tests: Sequence[Reached], usual: float, *, several: bool = False) -> str:
    """How it fails: "is 25 % slower" (at its best) or "fails"; of several ends "are 25 % slower" or "fail"."""
    if (share := slower_share(tests, usual)) is None:
        return "fail" if several else "fails"
    return f"{'are' if several else 'is'} {share_text(share)} slower"


def compared(tests: Sequence[Reached], usual: float, others: str) -> str:
    """Such as "is slower than the other hosts"."""
    return "fails with every partner" if slower_share(tests, usual) is None else f"is slower than the other {others}"


def path_title(ends: str, tests: Sequence[Reached], usual: float) -> str:
    """Such as "the path between n1 and n2 is slow"."""
    return f"the path between {ends} {'fails' if slower_share(tests, usual) is None else 'is slow'}"


def tests_text(tests: Sequence[Reached]) -> str:
    """The result of each test; equal ones in succession are counted."""
    words = [
        rate_text(tested.rate) if tested.rate is not None else WHYS.get(tested.why, "failed")
        for tested in tests[:_SHOWN]
    ]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    if len(words) > len(runs) == 1:
        return f"{words[0]} each time"
    return ", ".join(word if times == 1 else f"{word} ({times} times)" for word, times in runs)


def rates(tests: Sequence[Reached]) -> list[Scalar]:
    """The same for the evidence, in bytes per second; None where it did not end."""
    return [tested.rate for tested in tests[:_SHOWN]]


def truncation_of(seen: Seen[D]) -> tuple[str, str]:
    """Why it was cut short ("when the run ended"), and the fix.

    By a signal, for lack of time, or because ranks were lost; in this order, since the first explains the others.
    """
    kinds = {event.kind for event in seen.recording.events}
    if kinds.intersection(TOLD_TO_LEAVE):
        return "when a signal ended the run (RUN004)", "Run it again to the end."
    if EventKind.BUDGET in kinds or any(trial.hurried for trial in seen.trials):
        budget = seen.options.budget_seconds
        return f"when the time budget of {budget:g} s was used up", f"Run again with --budget {2 * budget:g}."
    skip = next((skip for skip in seen.recording.skips if skip.code == seen.check.code), None)
    if skip is not None:
        return f"because {skip.reason}", "Fix the finding of RUN002 first, or run again without these ranks."
    lost = sorted(e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None)
    if lost:
        stopped = f"when {ranks_text(lost)} stopped responding (RUN002)"
        return stopped, f"Fix the finding of RUN002 first, or run again without {ranks_text(lost)}."
    return "when the run ended", "Run it again to the end."
