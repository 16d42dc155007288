"""What the search among hosts came to, in findings."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric.hosts.data import FabricState
from ddpdiag.checks.fabric.pair_confirm_cover import Bad, Diagnosis, Path, Reached
from ddpdiag.checks.fabric.search import Alone, Located
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.model import EventKind, Finding, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import rate_text, share_text

D = TypeVar("D")

_SHOWN = 8
WHYS = {
    "hung": "did not end in time",
    "died": "crashed",
    "raised": "failed",
    "wrong": "gave wrong values",
    "unheard": "was not heard of again",
    "lost": "was lost",
    "skipped": "was ended",
}
_SLOW_TOGETHER = (
    " What all reach together is one test: by chance it met others' traffic, or the network between many hosts "
    "carries less than that between two."
)
_RUN_AGAIN = "Run it again; if all together stay slow, look at the switches above the leaves, and at NCCL_ALGO."


def findings(seen: Seen[D], fabric: FabricState) -> Iterator[Finding]:
    """Each thing to blame, or why nobody is; then what this run could see."""
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
        yield _systemic(seen, state.diagnosis, pairs=len(fabric.units) > 2)
        return
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
        f"{name} is bad by itself",
        f"{name}: its {len(ranks)} ranks among themselves: {tests_text(alone.tests)}"
        + (f"; hosts usually reach {rate_text(alone.usual)} busbw" if alone.usual else "")
        + ". No other host took part in that.",
        severity=severity(alone.tests, alone.usual, seen.number("error_share")),
        nodes=(name,),
        evidence={
            "rates_bytes_per_s": rates(alone.tests),
            "usual_bytes_per_s": alone.usual,
            **_slower(alone.tests, alone.usual),
        },
        fix=f"Leave {name} out, and look at its own health: clocks, memory, GPUs, other users.",
    )


def _node(seen: Seen[D], fabric: FabricState, bad: Bad, found: Diagnosis) -> Finding:
    name, *partners = (fabric.fleet.names[unit] for unit in (bad.unit, *bad.partners))
    by_srun = f" (srun --exclude={name})" if seen.world.in_slurm else ""
    return seen.finding(
        "node",
        f"{name} holds the others back",
        f"{name} is {how(bad.tests, found.bar.usual)} with each of {len(partners)} partners "
        f"({names_text(partners, _SHOWN)}), {tests_text(bad.tests)}; pairs of hosts usually reach "
        f"{rate_text(found.bar.usual)} busbw, and these partners do with others.",
        severity=severity(bad.tests, found.bar.usual, seen.number("error_share")),
        nodes=(name,),
        evidence={
            "partners": [*partners[:_SHOWN]],
            "rates_bytes_per_s": rates(bad.tests),
            "usual_bytes_per_s": found.bar.usual,
            "least_bytes_per_s": found.bar.least,
            **_slower(bad.tests, found.bar.usual),
        },
        fix=f"Leave {name} out of the job{by_srun}; look at its network links and its health.",
    )


def _slower(tests: Sequence[Reached], usual: float) -> dict[str, float]:
    """For the evidence, where it is slow and no more."""
    share = slower_share(tests, usual)
    return {} if share is None else {"slower_share": share}


def _path(seen: Seen[D], fabric: FabricState, path: Path, found: Diagnosis) -> Finding:
    one, other = (fabric.fleet.names[unit] for unit in path.pair)
    return seen.finding(
        "path",
        f"the way between {one} and {other} is bad",
        f"{one} and {other} are {how(path.tests, found.bar.usual)} together in {len(path.tests)} tests, "
        f"{tests_text(path.tests)}, and each of them is good with others ({rate_text(found.bar.usual)} busbw): the "
        "way between the two is at fault, and neither host.",
        nodes=(),
        links=(f"{one} -> {other}", f"{other} -> {one}"),
        evidence={"rates_bytes_per_s": rates(path.tests), "usual_bytes_per_s": found.bar.usual},
        fix="Look at switches and routes between the two; until then keep one of the two out of the job.",
    )


def _domain(seen: Seen[D], fabric: FabricState, domain: str, units: Sequence[int]) -> Finding:
    names = [fabric.fleet.names[unit] for unit in units]
    return seen.finding(
        "domain",
        f"{domain} holds the others back: {len(names)} of its hosts are bad",
        f"{len(names)} hosts of {domain} are bad with every partner ({names_text(names, _SHOWN)}): so many at once are "
        "the leaf or rack's fault, not each host's.",
        nodes=names,
        evidence={"domain": domain},
        fix=f"Look at the switch, power and cooling of {domain}; leave its hosts out until then.",
    )


def _systemic(seen: Seen[D], found: Diagnosis, *, pairs: bool) -> Finding:
    if not pairs:
        return seen.finding(
            "undecided",
            "two hosts cannot tell which of them is at fault",
            f"Two hosts are slow together, or do not end: {found.systemic}. Add a third one to find out.",
            fix="Run again with one host more.",
        )
    ended = "did not end" in found.systemic or "expected" in found.systemic
    return seen.finding(
        "systemic",
        "most pairs of hosts are bad: nobody is blamed",
        f"{found.systemic[:1].upper()}{found.systemic[1:]} (usual: {rate_text(found.bar.usual)} busbw). Where so many "
        "are bad it is what they share: a setting, an interface, a fallback to sockets, a switch.",
        severity=Severity.ERROR if ended or found.bar.usual < found.bar.least else Severity.WARNING,
        evidence={"usual_bytes_per_s": found.bar.usual},
        fix="Compare the interface in use (RDZ003) and the transport (P2P004) with what is meant, then run again.",
    )


def _transient(seen: Seen[D], fabric: FabricState, found: Diagnosis) -> Finding:
    names = fabric.fleet.names
    told = [f"{names[path.pair[0]]} - {names[path.pair[1]]}" for path in (*found.transients, *found.unrepeated)]
    few = len(found.unrepeated)
    again = [f"{len(found.transients)} passed when tried again"] if found.transients else []
    once = [f"{few} {'was' if few == 1 else 'were'} not tried often enough"] if few else []
    return seen.finding(
        "transient",
        "some pairs of hosts failed now and then",
        f"{'1 pair was' if len(told) == 1 else f'{len(told)} pairs were'} bad while both ends are good: "
        f"{', '.join(again + once)}.",
        evidence={"pairs": [*told]},
    )


def _undecided(seen: Seen[D], fabric: FabricState, found: Diagnosis) -> Finding:
    names = tuple(fabric.fleet.names[unit] for unit in found.open)
    return seen.finding(
        "undecided",
        "some hosts could be neither cleared nor blamed",
        f"{names_text(names, _SHOWN)}: bad in {found.rounds} rounds, and no good partner is left to try "
        f"{'it' if len(names) == 1 else 'them'} with.",
        evidence={"hosts": [*names]},
        fix="Run again with more hosts.",
    )


def _proof(seen: Seen[D], state: Located) -> Iterator[Finding]:
    proof = state.proof
    if proof is None or proof.rate is not None or proof.why == "lost":
        return  # RUN002 names the lost
    yield seen.finding(
        "unproven",
        "hosts that are good in pairs fail together",
        f"The all-reduce over all {len(state.diagnosis.cleared)} good hosts {WHYS.get(proof.why, 'failed')}, though "
        "each is good in pairs: look at what only shows in large groups (limits of open files and memory, a switch).",
        fix="Try half of the hosts, and look at RUN003.",
    )


def _clear(seen: Seen[D], fabric: FabricState, state: Located) -> Finding:
    found = state.diagnosis
    bad = {alone.unit for alone in state.alone} | {own.unit for own in found.bad}
    proven = state.proof.rate if state.proof is not None else None
    rate = f", {rate_text(proven)} busbw all together" if proven else ""
    # The proof is one test, and its ring goes over more switches than a pair: no host is blamed for it.
    slow = bool(proven and proven < found.bar.least)
    rounds = "1 round" if found.rounds == 1 else f"{found.rounds} rounds"
    if len(fabric.units) > 2:
        seen_from = f"A host that is {share_text(found.found_from)} slower would have been found (99 of 100 times)."
    else:
        seen_from = "Two hosts are held against nobody: that one of them is slow would show beside a third one."
    return seen.finding(
        "clear",
        ("the other hosts hold nobody back" if bad else "no host holds the others back")
        + (" in pairs, but all together they are slow" if slow else ""),
        f"{len(fabric.units) - len(bad):,}{' other' if bad else ''} hosts in {rounds} of pairs: "
        f"{rate_text(found.bar.usual)} busbw as usual{rate}. {seen_from}" + (_SLOW_TOGETHER if slow else ""),
        fix=_RUN_AGAIN if slow else "",
    )


def _topology(seen: Seen[D], fabric: FabricState) -> Iterator[Finding]:
    """A file that names other hosts than these would help nobody, unnoticed."""
    names, known = fabric.fleet.names, fabric.given_domains
    missing = [name for unit, name in enumerate(names) if unit not in known]
    if not seen.options.topology or not missing:
        return
    yield seen.finding(
        "topology",
        f"--topology names {len(known)} of {len(names)} hosts",
        f"It does not name {names_text(missing, _SHOWN)}: these were paired as if each hung on a leaf of its own."
        if known
        else f"None of the hosts {names_text(missing, _SHOWN)} is in the file: it was not used.",
        evidence={"hosts": [*missing]},
        fix="Write the names as this report does.",
    )


def _unfinished(seen: Seen[D], fabric: FabricState) -> Finding:
    when, fix = truncation_of(seen)
    done = "1 round was" if len(fabric.answers) == 1 else f"{len(fabric.answers)} rounds were"
    return seen.finding(
        "unmeasured",
        "the search among hosts was cut short",
        f"{done} done, and then it ended {when}; who holds the others back is not known.",
        fix=fix,
        of_the_run=True,
    )


def severity(tests: Sequence[Reached], usual: float, error_share: float) -> Severity:
    """An error where it does not end, or is far below at its best; else it slows the job down."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    bad = len(known) < len(tests) or max(known, default=0.0) < error_share * usual
    return Severity.ERROR if bad else Severity.WARNING


def how(tests: Sequence[Reached], usual: float) -> str:
    """How bad: "25 % slower" at its best."""
    share = slower_share(tests, usual)
    return "bad" if share is None else f"{share_text(share)} slower"


def slower_share(tests: Sequence[Reached], usual: float) -> float | None:
    """By which share of the usual rate the best of them is slower; None where one did not end, or nothing is usual."""
    known = [tested.rate for tested in tests if tested.rate is not None]
    return 1 - max(known) / usual if known and len(known) == len(tests) and usual else None


def tests_text(tests: Sequence[Reached]) -> str:
    """What each test came to; the same one after the other is counted."""
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

    By a signal, for want of time, or because ranks left; in this order, since the first explains the others.
    """
    kinds = {event.kind for event in seen.recording.events}
    if kinds.intersection(TOLD_TO_LEAVE):
        return "when the run was told to end (RUN004)", "Run it again, and let it end."
    if EventKind.BUDGET in kinds or any(trial.hurried for trial in seen.trials):
        budget = seen.options.budget_seconds
        return f"when the budget of {budget:g} s was spent", f"Give it more time (--budget {2 * budget:g})."
    skip = next((skip for skip in seen.recording.skips if skip.code == seen.check.code), None)
    if skip is not None:
        return f"because {skip.reason}", "Mend that first (RUN002), or run again without these ranks."
    lost = sorted(e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None)
    if lost:
        return f"when {ranks_text(lost)} fell silent (RUN002)", "Mend that first, or run again without them."
    return "when the run ended", "Run it again, and let it end."
