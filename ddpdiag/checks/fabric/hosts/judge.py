"""The findings of the search among hosts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.hosts.congested import congested
from ddpdiag.checks.fabric.hosts.data import FabricState
from ddpdiag.checks.fabric.notes import Bad, Diagnosis, Path, Reached, Systemic
from ddpdiag.checks.fabric.rules import Bar
from ddpdiag.checks.fabric.search import Alone, Located
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.model import EventKind, Finding, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import begun, count, rate_text, share_text

D = TypeVar("D")

_SHOWN = 8
WHYS = {
    "hung": "did not end in time",
    "died": "crashed",
    "raised": "failed",
    "wrong": "gave wrong values",
    "unheard": "sent no result",
    "lost": "was lost",
    "skipped": "was ended early",
}
_SLOW_TOGETHER = (
    " The rate of all together is from one test: other traffic may have slowed it down, or the network between many "
    "hosts carries less than that between two."
)
_RUN_AGAIN = "Run it again; if all together stay slow, look at the switches above the leaves, and at NCCL_ALGO."


def findings(seen: Seen[D], fabric: FabricState) -> Iterator[Finding]:
    """Each thing to blame, or why none is; then the smallest slowdown that this run could find."""
    if not seen.trials:
        return
    state = fabric.state
    if not isinstance(state, Located):
        yield _unfinished(seen, fabric)
        return
    yield from _topology(seen, fabric)
    # What explains many hosts comes before single ones: the first of the errors is what the verdict names.
    for domain, units in state.diagnosis.domains:
        yield _domain(seen, fabric, str(domain), units)
    for alone in state.alone:
        yield _alone(seen, fabric, alone)
    if state.diagnosis.systemic:
        yield _systemic(seen, state.diagnosis.systemic, state.diagnosis.bar, pairs=len(fabric.units) > 2)
        return
    for part in state.diagnosis.congested:
        serious = severity(part.quiet, state.diagnosis.bar.usual, seen.number("error_share"))
        yield congested(seen, fabric, part, state.diagnosis.bar, serious)
    yield from _blamed(seen, fabric, state.diagnosis)
    yield from _proof(seen, state)
    if not state.diagnosis.open:
        yield _clear(seen, fabric, state)


def _blamed(seen: Seen[D], fabric: FabricState, found: Diagnosis) -> Iterator[Finding]:
    in_domains = {unit for _, units in found.domains for unit in units}
    for bad in found.bad:
        if bad.unit not in in_domains:
            yield _node(seen, fabric, bad, found)
    yield from (_path(seen, fabric, path, found) for path in found.paths)
    if found.transients or found.unrepeated:
        yield _transient(seen, fabric, found)
    if found.open:
        yield _undecided(seen, fabric, found)


def _alone(seen: Seen[D], fabric: FabricState, alone: Alone) -> Finding:
    name, ranks = fabric.fleet.names[alone.unit], fabric.fleet.ranks[alone.unit]
    return seen.finding(
        "alone",
        f"{name} {'fails' if slower_share(alone.tests, alone.usual) is None else 'is slow'} when tested alone",
        f"{name}: the all-reduce among its {count(len(ranks), 'rank')}, without another host: {tests_text(alone.tests)}"
        + (f"; hosts usually reach {rate_text(alone.usual)} busbw." if alone.usual else "."),
        severity=severity(alone.tests, alone.usual, seen.number("error_share")),
        nodes=(name,),
        evidence={
            "rates_bytes_per_s": rates(alone.tests),
            "usual_bytes_per_s": alone.usual,
            **slower(alone.tests, alone.usual),
        },
        fix=f"Exclude {name} from the job, and check the host itself: clocks, memory, GPUs, other users.",
    )


def _node(seen: Seen[D], fabric: FabricState, bad: Bad, found: Diagnosis) -> Finding:
    name, *partners = (fabric.fleet.names[unit] for unit in (bad.unit, *bad.partners))
    others = tuple(dict.fromkeys(partners))
    too = ", in quiet rounds too" if bad.quiet else ""
    by_srun = f" (srun --exclude={name})" if seen.world.in_slurm else ""
    return seen.finding(
        "node",
        f"{name} {compared(bad.tests, found.bar.usual, 'hosts')}",
        f"{name} {how(bad.tests, found.bar.usual)} with each of {count(len(others), 'partner')} "
        f"({names_text(others, _SHOWN)}){too}: {tests_text(bad.tests)}. Pairs of hosts usually reach "
        f"{rate_text(found.bar.usual)} busbw, and these partners reach it with others.",
        severity=severity(bad.tests, found.bar.usual, seen.number("error_share")),
        nodes=(name,),
        evidence={
            "partners": [*partners[:_SHOWN]],
            "rates_bytes_per_s": rates(bad.tests),
            "usual_bytes_per_s": found.bar.usual,
            "least_bytes_per_s": found.bar.least,
            "quiet_bytes_per_s": rates(bad.quiet),
            **slower(bad.tests, found.bar.usual),
        },
        fix=f"Exclude {name} from the job{by_srun}; check its network links and the host itself.",
    )


def slower(tests: Sequence[Reached], usual: float) -> dict[str, float]:
    """For the evidence, where it is slow and no more."""
    share = slower_share(tests, usual)
    return {} if share is None else {"slower_share": share}


def _path(seen: Seen[D], fabric: FabricState, path: Path, found: Diagnosis) -> Finding:
    one, other = (fabric.fleet.names[unit] for unit in path.pair)
    return seen.finding(
        "path",
        path_title(f"{one} and {other}", path.tests, found.bar.usual),
        f"{one} and {other} {how(path.tests, found.bar.usual, several=True)} with each other in "
        f"{count(len(path.tests), 'test')}: {tests_text(path.tests)}. Each of them passes with other partners "
        f"({rate_text(found.bar.usual)} busbw): the network path between the two is at fault, and neither host.",
        nodes=(),
        links=(f"{one} -> {other}", f"{other} -> {one}"),
        evidence={"rates_bytes_per_s": rates(path.tests), "usual_bytes_per_s": found.bar.usual},
        fix="Check the switches and routes between the two; until then exclude one of the two from the job.",
    )


def _domain(seen: Seen[D], fabric: FabricState, domain: str, units: Sequence[int]) -> Finding:
    names = [fabric.fleet.names[unit] for unit in units]
    return seen.finding(
        "domain",
        f"{domain} is at fault: {len(names)} of its hosts are slow or fail with every partner",
        f"{len(names)} hosts of {domain} are slow or fail with every partner ({names_text(names, _SHOWN)}): "
        "so many at once are the fault of the leaf or rack, not of each host.",
        nodes=names,
        evidence={"domain": domain},
        fix=f"Check the switch, power and cooling of {domain}; exclude its hosts until then.",
    )


def _systemic(seen: Seen[D], systemic: Systemic, bar: Bar, *, pairs: bool) -> Finding:
    if not pairs:
        return seen.finding(
            "undecided",
            "two hosts are slow or fail together; which one is at fault is not known",
            f"The all-reduce between the two hosts is too slow, or does not end: {systemic.reason}.",
            fix="Run again with a third host: it shows which of the two is at fault.",
        )
    return seen.finding(
        "systemic",
        "most pairs of hosts are slow or fail: no host is blamed",
        f"{begun(systemic.reason)} (usual: {rate_text(bar.usual)} busbw). The cause of so many failures is "
        "shared by the hosts: a setting, an interface, a fallback to sockets, a switch.",
        severity=Severity.ERROR if systemic.too_slow or bar.usual < bar.least else Severity.WARNING,
        evidence={"usual_bytes_per_s": bar.usual},
        fix="Check that the interface (RDZ003) and the transport (P2P004) in use are as intended, then run again.",
    )


def _transient(seen: Seen[D], fabric: FabricState, found: Diagnosis) -> Finding:
    names = fabric.fleet.names
    told = [f"{names[path.pair[0]]} - {names[path.pair[1]]}" for path in (*found.transients, *found.unrepeated)]
    few = len(found.unrepeated)
    again = [f"{len(found.transients)} passed when repeated"] if found.transients else []
    once = [f"{few} {'was' if few == 1 else 'were'} not repeated often enough"] if few else []
    return seen.finding(
        "transient",
        "some pairs of hosts failed for a short time",
        f"{count(len(told), 'pair')} failed although both hosts pass with others: {', '.join(again + once)}.",
        evidence={"pairs": [*told]},
    )


def _undecided(seen: Seen[D], fabric: FabricState, found: Diagnosis) -> Finding:
    names = tuple(fabric.fleet.names[unit] for unit in found.open)
    return seen.finding(
        "undecided",
        "the only two hosts of a leaf are slow; whether they or the leaf is at fault is not known",
        f"{names_text(names, _SHOWN)}: slow in {count(found.rounds, 'round')}. No other host of this run is behind the "
        "same leaf switch: either the hosts are slow, or the switch.",
        evidence={"hosts": [*names]},
        fix="Run again with a third host behind that switch: it shows which it is.",
    )


def _proof(seen: Seen[D], state: Located) -> Iterator[Finding]:
    proof = state.proof
    if proof is None or proof.rate is not None or proof.why == "lost":
        return  # RUN002 names the lost
    yield seen.finding(
        "unproven",
        "hosts that pass in pairs fail all together",
        f"The all-reduce over all {len(state.diagnosis.cleared)} healthy hosts {WHYS.get(proof.why, 'failed')}, "
        "although each of them passes in pairs: the cause shows in large groups only (limits of open files and memory, "
        "a switch).",
        fix="Run again with half of the hosts, and look at RUN003.",
    )


def _clear(seen: Seen[D], fabric: FabricState, state: Located) -> Finding:
    found = state.diagnosis
    behind = {unit for part in found.congested for unit in part.units} - found.cleared
    bad = {alone.unit for alone in state.alone} | {own.unit for own in found.bad} | behind
    proven = state.proof.rate if state.proof is not None else None
    rate = f", {rate_text(proven)} busbw all together" if proven else ""
    # The proof is one test, and its ring goes over more switches than a pair: no host is blamed for it.
    slow = bool(proven and proven < found.bar.least)
    if len(fabric.units) > 2:
        seen_from = f"A host that is {share_text(found.found_from)} slower would have been found (99 of 100 times)."
    else:
        seen_from = "Two hosts have no third one to compare with: a slowdown of one of them is not found."
    return seen.finding(
        "clear",
        ("none of the other hosts is slow or fails" if bad else "no host is slow or fails")
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
        f"It does not name {names_text(missing, _SHOWN)}: each of these was paired as if it had a leaf of its own."
        if known
        else f"None of the hosts {names_text(missing, _SHOWN)} is in the file: the file was not used.",
        evidence={"hosts": [*missing]},
        fix="Write the names of the hosts in the file as this report does.",
    )


def _unfinished(seen: Seen[D], fabric: FabricState) -> Finding:
    when, fix = truncation_of(seen)
    return seen.finding(
        "unmeasured",
        "the search for a slow host was not completed",
        f"It ended after {count(len(fabric.answers), 'round')}, {when}; which host is slow or fails is not known.",
        fix=fix,
        of_the_run=True,
    )


def severity(tests: Sequence[Reached], usual: float, error_share: float) -> Severity:
    """An error where it does not end, or is far below at its best; else it slows the job down."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    bad = len(known) < len(tests) or max(known, default=0.0) < error_share * usual
    return Severity.ERROR if bad else Severity.WARNING


def how(tests: Sequence[Reached], usual: float, *, several: bool = False) -> str:
    """How it fails: "is 25 % slower" (at its best) or "fails"; of several ends "are 25 % slower" or "fail"."""
    share = slower_share(tests, usual)
    if share is None:
        return "fail" if several else "fails"
    return f"{'are' if several else 'is'} {share_text(share)} slower"


def compared(tests: Sequence[Reached], usual: float, others: str) -> str:
    """Such as "is slower than the other hosts"."""
    return "fails with every partner" if slower_share(tests, usual) is None else f"is slower than the other {others}"


def path_title(ends: str, tests: Sequence[Reached], usual: float) -> str:
    """Such as "the path between n1 and n2 is slow"."""
    return f"the path between {ends} {'fails' if slower_share(tests, usual) is None else 'is slow'}"


def slower_share(tests: Sequence[Reached], usual: float) -> float | None:
    """By which share of the usual rate the best of them is slower; None where one did not end, or nothing is usual."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None


def tests_text(tests: Sequence[Reached]) -> str:
    """The result of each test; equal ones in succession are counted."""
    words = [
        rate_text(tested.rate) if tested.rate is not None else WHYS.get(tested.why, "failed")
        for tested in tests[:_SHOWN]
    ]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return ", ".join(word if times == 1 else f"{word} ({times} times)" for word, times in runs)


def rates(tests: Sequence[Reached]) -> list[str | int | float | bool | None]:
    """The same for the evidence, in bytes per second; None where it did not end."""
    return [tested.rate for tested in tests[:_SHOWN]]


def truncation_of(seen: Seen[D]) -> tuple[str, str]:
    """Why it was cut short ("when the run ended"), and the fix.

    By a signal, for lack of time, or because ranks were lost; in this order, since the first explains the others.
    """
    kinds = {event.kind for event in seen.recording.events}
    if kinds.intersection(TOLD_TO_LEAVE):
        return "when a signal ended the run (RUN004)", "Run it again, and do not interrupt it."
    if EventKind.BUDGET in kinds or any(trial.hurried for trial in seen.trials):
        budget = seen.options.budget_seconds
        return f"when the budget of {budget:g} s was spent", f"Give it more time (--budget {2 * budget:g})."
    skip = next((skip for skip in seen.recording.skips if skip.code == seen.check.code), None)
    if skip is not None:
        return f"because {skip.reason}", "Fix that first (RUN002), or run again without these ranks."
    lost = sorted(e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None)
    if lost:
        stopped = f"when {ranks_text(lost)} stopped responding (RUN002)"
        return stopped, f"Fix that first, or run again without {ranks_text(lost)}."
    return "when the run ended", "Run it again, and do not interrupt it."
