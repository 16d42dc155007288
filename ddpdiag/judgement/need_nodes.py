"""The verdict of a job that needs fewer hosts than there are (--need-nodes)."""

from collections.abc import Container, Mapping, Sequence, Set

from msgspec import structs

from ddpdiag.checks.api import Stage
from ddpdiag.checks.findings import workarounds_text
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import World
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.judged import Judged
from ddpdiag.judgement.verdict import Conclusion, exit_code, tested
from ddpdiag.model import EventKind, Finding, HostsLine, Recording, Severity, Status, Verdict

# Stages in which ranks exchange what a job does.
_COLLECTIVE = (Stage.COLLECTIVE, Stage.FABRIC, Stage.TRAINING)


def enough(
    world: World,
    recording: Recording,
    judged: Sequence[Judged],
    whole: Conclusion,
    hosts: HostsLine,
    workarounds: Mapping[str, str | None] | None = None,
) -> Conclusion:
    """What the run comes to for a job that needs so many hosts; `whole` is what it comes to on all of them.

    FIT if so many are good: errors concern others then. But what was not looked at on the good ones is no more healthy
    for that, and a collective of the job's backend must have been done on all of them. UNFIT if too many are bad.
    """
    options = recording.header.options
    need = options.need_nodes
    if need is None or options.bench is not None or options.train is not None or whole.exit_code == ExitCode.USAGE:
        return whole
    names = dict.fromkeys([*(name for name, _ in world.hosts), *hosts.bad])
    said = f"{len(hosts.good)} of {len(names)} hosts are good, {need} needed"
    if len(names) - len(hosts.bad) < need and recording.end is not None and not _nowhere(world, recording):
        return Conclusion(Verdict.UNFIT, exit_code(recording, ExitCode.UNFIT), f"{said}. {whole.sentence}")
    if len(hosts.good) < need and whole.verdict is Verdict.FIT:
        sentence = f"{said}, and nothing is sure of the others. {whole.sentence}"
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.UNKNOWN), sentence)
    if len(hosts.good) < need or whole.verdict is Verdict.FIT:
        return Conclusion(whole.verdict, whole.exit_code, f"{said}. {whole.sentence}")
    good = frozenset(hosts.good)
    left = names_text([name for name in names if name not in good])
    return _without(world, recording, judged, good, f"{said}{f', without {left}' if left else ''}", workarounds or {})


def _without(
    world: World,
    recording: Recording,
    judged: Sequence[Judged],
    good: Set[str],
    said: str,
    workarounds: Mapping[str, str | None],
) -> Conclusion:
    """What the run comes to on the good hosts alone, which are enough."""
    ranks = _ranks_of(world, good)
    alone = structs.replace(recording, outcomes=tuple(own for own in recording.outcomes if own.rank in ranks))
    if doubt := _doubt(world, alone, judged, good):
        sentence = f"{said}; but whether these can train is not known: {doubt}. Run again on them."
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.UNKNOWN), sentence)
    warnings = any(
        finding.severity is Severity.WARNING and _concerns(world, finding, good)
        for own in judged
        for finding in own.findings
    )
    code = ExitCode.UNFIT if warnings and recording.header.options.strict else ExitCode.FIT
    sentence = (
        f"{said}: nothing speaks against training on these, as far as it was tested ({_tested_text(alone, judged)})"
    )
    sentence += f"; {workarounds_text(workarounds)} only" if workarounds else ""
    return Conclusion(Verdict.FIT, exit_code(recording, code), f"{sentence}.")


def _tested_text(recording: Recording, judged: Sequence[Judged]) -> str:
    """What was done on the hosts whose outcomes these are, and what should have been."""
    done = {outcome.code for outcome in recording.outcomes if outcome.status is Status.DONE}
    meant = [own.check for own in judged if own.check.measure is not None and not (own.skip and own.skip.grounds)]
    missed = [check.code for check in meant if check.code not in done]
    return ", ".join(tested(recording, judged)) + (f"; not done: {', '.join(missed)}" if missed else "")


def _doubt(world: World, recording: Recording, judged: Sequence[Judged], good: Set[str]) -> str:
    """What is not known of the good hosts, or nothing."""
    if nowhere := _nowhere(world, recording):
        return f"{ranks_text(nowhere)} never came, and may belong on any of them"
    for own in judged:
        if not own.readable:
            return f"what {own.check.code} recorded cannot be read by this version"
        for finding in own.not_seen():
            if _concerns(world, finding, good):
                return finding.title
    return "" if _tried_together(world, recording, judged, good) else "no collective ran on all of them"


def _nowhere(world: World, recording: Recording) -> list[int]:
    """Ranks that never came, and whose hosts nobody knows."""
    homes = {event.rank for event in recording.events if event.kind is EventKind.ABSENT and event.node}
    known = len(recording.header.layout) == world.size
    return [] if known else [rank for rank in range(world.size) if rank not in world.arrivals and rank not in homes]


def _concerns(world: World, finding: Finding, good: Container[str]) -> bool:
    """Does it name one of these hosts, or nobody?"""
    ends = [end for link in finding.links for end in link.split(" -> ")]
    named = (*finding.nodes, *world.nodes_of(finding.ranks), *ends)
    return not named or any(name in good for name in named)


def _ranks_of(world: World, names: Container[str]) -> frozenset[int]:
    return frozenset(rank for (name, _), own in world.hosts.items() if name in names for rank in own)


def _tried_together(world: World, recording: Recording, judged: Sequence[Judged], good: Set[str]) -> bool:
    """Did the job's backend work among all ranks of these hosts at once, if it was to be tried at all?"""
    ranks = _ranks_of(world, good)
    asked = {
        own.check.code for own in judged if own.check.stage in _COLLECTIVE and (not own.skip or not own.skip.grounds)
    }
    if len(ranks) == 1 or not asked:
        return True
    whole = {
        trial.number
        for trial in recording.trials
        if trial.code in asked
        and trial.params.get("backend", world.backend) == world.backend
        and any(ranks.issubset(group) for group in trial.groups)
    }
    done: dict[int, set[int]] = {}
    for outcome in recording.outcomes:
        if outcome.trial in whole and outcome.status is Status.DONE:
            done.setdefault(outcome.trial, set()).add(outcome.rank)
    return any(ranks.issubset(own) for own in done.values())
