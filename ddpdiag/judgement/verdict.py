"""The verdict and its sentence, for all hosts or as many as a job needs (--need-hosts)."""

import signal
from collections.abc import Container, Mapping, Sequence, Set

from msgspec import Struct, structs

from ddpdiag.checks.api import Stage
from ddpdiag.checks.findings import Effect, Section, workarounds_text
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import World
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.doubt import tested
from ddpdiag.judgement.ending import Run, ended_by_a_signal
from ddpdiag.judgement.hosts import slower_share
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import Finding, HostsLine, Recording, Scalar, Severity, Status, Verdict
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import count, rate_text, times_text

_SPEED = "training.samples_per_second"
# So many slow hosts are named in the sentence; of more there is a list above it.
_FEW = 4
# Stages in which ranks exchange what a job does.
_COLLECTIVE = (Stage.COLLECTIVE, Stage.FABRIC, Stage.TRAINING)

_STRICT = " The exit code is 1, because --strict was given."


class Conclusion(Struct, frozen=True):
    """The result of the run. `degraded`: it is FIT, and a host or rank slows the job down."""

    verdict: Verdict
    exit_code: int
    sentence: str
    degraded: bool = False


def conclude(
    world: World,
    run: Run,
    judged: Sequence[Judged],
    doubt: str,
    hosts: HostsLine,
    workarounds: Mapping[str, str | None],
) -> Conclusion:
    """The result for all hosts, or for as many as the job needs. `workarounds`: variables without which it is UNFIT."""
    whole = _of_all_hosts(world, run.recording, judged, doubt, workarounds)
    options = run.recording.header.options
    if options.need_hosts is None or options.bench or options.train or whole.exit_code == ExitCode.USAGE:
        return whole
    return _of_needed_hosts(world, run.established, judged, whole, hosts, options.need_hosts, workarounds)


def _of_all_hosts(
    world: World, recording: Recording, judged: Sequence[Judged], doubt: str, workarounds: Mapping[str, str | None]
) -> Conclusion:
    """UNFIT for an error that will break a job; UNKNOWN for a doubt; else FIT.

    A run that was made for one check has that check's sentence.
    """
    own = next((j.added.section for j in judged if j.added.section is not None), None)
    errors = [(j, f) for j in judged for f in j.findings if f.severity is Severity.ERROR]
    mistakes = [finding for j, finding in errors if j.effect_of(finding) is Effect.USAGE]
    broken = [(j.check.stage, finding) for j, finding in errors if j.effect_of(finding) is Effect.UNFIT]
    if fatal := [finding for _, finding in broken]:
        needed = {Stage.COLLECTIVE, Stage.TRAINING, Stage.RUN}
        trained = _trained(judged) is not None and needed.isdisjoint(stage for stage, _ in broken)
        trained = trained and not _backend_failed(world, recording)
        sentence = _unfit(world, fatal, trained=trained) if own is None else _failed(fatal, own)
        return Conclusion(Verdict.UNFIT, exit_code(recording, ExitCode.UNFIT), sentence)
    if mistakes:
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.USAGE), f"{mistakes[0].title}.")
    if doubt:
        question = "Whether {} can train" if own is None else own.question
        sentence = f"{question.format(who(world))} is not known: {doubt}."
        sentence += f" {own.sentence}" if own is not None and own.measured else ""
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.UNKNOWN), sentence)
    warnings = sum(f.severity is Severity.WARNING for j in judged for f in j.findings)
    code = ExitCode.UNFIT if warnings and recording.header.options.strict else ExitCode.FIT
    sentence = _fit(world, recording, judged, warnings, workarounds) if own is None else own.sentence
    sentence += _STRICT if code is ExitCode.UNFIT else ""
    return Conclusion(Verdict.FIT, code, sentence, degraded=any(any(j.slowing()) for j in judged))


def _backend_failed(world: World, recording: Recording) -> bool:
    """Whether a trial over the job's backend failed. An error that explains it may be one of another stage."""
    own = {t.number for t in recording.trials if t.params.get("backend") == world.backend and not t.may_fail}
    return any(o.trial in own and o.status not in (Status.DONE, Status.SKIPPED) for o in recording.outcomes)


def _failed(fatal: Sequence[Finding], own: Section) -> str:
    """The error first, then what the figures mean."""
    more = f" ({count(len(fatal) - 1, 'more error')})" if len(fatal) > 1 else ""
    meaning = f" {own.sentence}" if own.measured else ""
    return f"{fatal[0].title}{more}.{meaning}"


def exit_code(recording: Recording, code: ExitCode) -> int:
    """The code of the signal that ended the run, else `code`. Ctrl-C counts also where a rank was lost."""
    signals = [e.detail for e in recording.events if e.kind in TOLD_TO_LEAVE]
    if str(int(signal.SIGINT)) in signals:
        return ExitCode.INTERRUPTED
    return ExitCode.TERMINATED if ended_by_a_signal(recording) or (signals and code is ExitCode.UNKNOWN) else code


def who(world: World) -> str:
    """The world in words: "4 ranks on 2 hosts", or "host n7" where it was tested alone."""
    if world.options.alone:
        return f"host {world.host_of(0)}"
    return f"{count(world.size, 'rank')} on {count(len(world.hosts), 'host')}"


def _unfit(world: World, fatal: Sequence[Finding], *, trained: bool) -> str:
    """The first finding that names a rank, host or link; of several findings of one code, all their hosts."""
    first = next((f for f in fatal if f.ranks or f.hosts or f.links), fatal[0])
    alike = [finding for finding in fatal if finding.code == first.code]
    hosts = tuple(dict.fromkeys(node for finding in alike for node in finding.hosts))
    if len(alike) == 1 or len(hosts) == 1 or not all(finding.hosts for finding in alike):
        alike, what = [first], first.title
    else:
        share = f"{len(hosts):,} of {count(len(world.hosts), 'host')} fail"
        what = f"{share}: {names_text(hosts)} ({first.code}: {first.title})"
    others = len(fatal) - len(alike)
    more = f" ({count(others, 'more error')})" if others else ""
    can = "can train, but with errors" if trained else "cannot train"
    return f"{who(world)} {can}: {what}{more}."


def _trained(judged: Sequence[Judged]) -> Scalar:
    """Samples per second, if there was a training."""
    return next((own.added.figures[_SPEED] for own in judged if _SPEED in own.added.figures), None)


def _fit(
    world: World, recording: Recording, judged: Sequence[Judged], warnings: int, workarounds: Mapping[str, str | None]
) -> str:
    figures = {name: value for own in judged for name, value in own.added.figures.items()}
    trained = _trained(judged)
    options = recording.header.options
    limited = bool(options.stages or options.skip_stages or options.select or options.ignore)
    if trained is None:
        stages = ", ".join(tested(recording, judged))
        text = f"{who(world)}: no problems found in the stages that ran ({stages})"
    else:
        speed = f", {trained:,.0f} samples/s" if isinstance(trained, int | float) else ""
        busbw = figures.get(f"all_reduce.{world.backend}.busbw_bytes_per_s", figures.get("fallback.busbw_bytes_per_s"))
        bus = f", all-reduce {rate_text(busbw)}" if isinstance(busbw, int | float) else ""
        text = f"{who(world)} can train with DDP over {world.backend}{speed}{bus}"
        if limited:
            text += "; only the selected checks ran"
    if workarounds:
        text += f"; only {workarounds_text(workarounds)}"
    if options.alone:
        text += "; no other host was tested"
    elif world.size == 1:
        text += "; there is one rank only, so communication was not tested"
    if slowing := [finding for own in judged for finding in own.slowing()]:
        text += f"; but {_slowed_text(world, slowing)}"
    if warnings:
        text += f"; {count(warnings, 'warning')}"
    return text + "."


def _slowed_text(world: World, slowing: Sequence[Finding]) -> str:
    """Describe slow ranks or hosts: "rank 3 on n1 makes the job up to 2.5 times slower"."""
    ranks = sorted({rank for finding in slowing for rank in finding.ranks})
    hosts = tuple(dict.fromkeys(name for own in slowing for name in own.hosts or world.hosts_of(own.ranks)))
    few = ""
    if all(finding.ranks for finding in slowing) and len(ranks) <= _FEW:
        who, number = f"{ranks_text(ranks)} on {names_text(hosts)}", len(ranks)
    elif len(world.hosts) == len(hosts) == 1:
        who, number = hosts[0], 1
    else:
        who, number = f"{len(hosts):,} of {count(len(world.hosts), 'host')}", len(hosts)
        few = f": {names_text(hosts)}" if number <= _FEW else ""
    shares = [share for finding in slowing if (share := slower_share(finding)) is not None]
    plural = "" if number != 1 else "s"
    if not shares:
        return f"{who} slow{plural} the job down{few}"
    return f"{who} make{plural} the job up to {times_text(1 / max(1 - max(shares), 1e-3))} slower{few}"


# A job that needs fewer hosts than there are --------------------------------------------------------------------------


def _of_needed_hosts(
    world: World,
    recording: Recording,
    judged: Sequence[Judged],
    whole: Conclusion,
    hosts: HostsLine,
    need: int,
    workarounds: Mapping[str, str | None],
) -> Conclusion:
    """The result for a job that needs so many hosts; `whole` is the result on all of them.

    FIT if so many are healthy: errors (with --strict, also warnings) concern others then. But everything that should
    be checked must have been checked on the healthy ones, and a collective of the job's backend must have been done on
    all of them. UNFIT if too many fail.
    """
    names = dict.fromkeys([*(name for name, _ in world.hosts), *hosts.failing])
    healthy = "is healthy" if len(hosts.healthy) == 1 else "are healthy"
    said = f"{len(hosts.healthy)} of {count(len(names), 'host')} {healthy}, {need} needed"
    if whole.verdict is Verdict.FIT and hosts.failing and len(hosts.healthy) < need:  # warnings, with --strict
        return structs.replace(whole, sentence=f"{said}. {whole.sentence}")
    if len(names) - len(hosts.failing) < need and recording.end is not None and not _nowhere(world, recording):
        return Conclusion(Verdict.UNFIT, exit_code(recording, ExitCode.UNFIT), f"{said}. {whole.sentence}")
    if len(hosts.healthy) < need and whole.verdict is Verdict.FIT:
        sentence = f"{said}; whether the others are healthy is not known. {whole.sentence}"
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.UNKNOWN), sentence)
    if len(hosts.healthy) < need or (whole.verdict is Verdict.FIT and not hosts.failing):
        return structs.replace(whole, sentence=f"{said}. {whole.sentence}")
    good = frozenset(hosts.healthy)
    left = names_text([name for name in names if name not in good])
    return _without(world, recording, judged, good, f"{said}{f', without {left}' if left else ''}", workarounds)


def _without(
    world: World,
    recording: Recording,
    judged: Sequence[Judged],
    good: Set[str],
    said: str,
    workarounds: Mapping[str, str | None],
) -> Conclusion:
    """The result on the healthy hosts alone, which are enough."""
    ranks = _ranks_of(world, good)
    alone = structs.replace(recording, outcomes=tuple(own for own in recording.outcomes if own.rank in ranks))
    if doubt := _doubt(world, alone, judged, good):
        sentence = f"{said}; but whether these can train is not known: {doubt}. Run again on these hosts."
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.UNKNOWN), sentence)
    warned = (finding for own in judged for finding in own.findings if finding.severity is Severity.WARNING)
    warnings = any(_concerns(world, finding, good) for finding in warned)
    code = ExitCode.UNFIT if warnings and recording.header.options.strict else ExitCode.FIT
    done = {outcome.code for outcome in alone.outcomes if outcome.status is Status.DONE}
    meant = [own.check for own in judged if own.check.measure is not None and not (own.skip and own.skip.grounds)]
    missed = [check.code for check in meant if check.code not in done]
    found = ", ".join(tested(alone, judged)) + (f"; not done: {', '.join(missed)}" if missed else "")
    degraded = any(_concerns(world, finding, good) for own in judged for finding in own.slowing())
    sentence = f"{said}: no problems found on these in the stages that ran ({found})"
    sentence += f"; only {workarounds_text(workarounds)}" if workarounds else ""
    sentence += f".{_STRICT if code is ExitCode.UNFIT else ''}"
    return Conclusion(Verdict.FIT, exit_code(recording, code), sentence, degraded)


def _doubt(world: World, recording: Recording, judged: Sequence[Judged], good: Set[str]) -> str:
    """The first thing that is not known of the healthy hosts, or nothing."""
    if nowhere := _nowhere(world, recording):
        return f"{ranks_text(nowhere)} never joined, and may belong on any of them"
    for own in judged:
        if not own.readable:
            return f"this version of ddpdiag cannot read the recorded data of {own.check.code}"
        for finding in own.not_seen():
            if _concerns(world, finding, good):
                return finding.title
    return "" if _tried_together(world, recording, judged, good) else "no collective ran on all of them"


def _nowhere(world: World, recording: Recording) -> list[int]:
    """Ranks that never joined, and whose hosts are not known."""
    known = len(recording.header.layout) == world.size
    return [] if known else [rank for rank in range(world.size) if rank not in world.arrivals]


def _concerns(world: World, finding: Finding, good: Container[str]) -> bool:
    """Whether it names one of these hosts, or none at all."""
    ends = [end for link in finding.links for end in link.split(" -> ")]
    named = (*finding.hosts, *world.hosts_of(finding.ranks), *ends)
    return not named or any(name in good for name in named)


def _ranks_of(world: World, names: Container[str]) -> frozenset[int]:
    return frozenset(rank for (name, _), own in world.hosts.items() if name in names for rank in own)


def _tried_together(world: World, recording: Recording, judged: Sequence[Judged], good: Set[str]) -> bool:
    """Whether the job's backend worked among all ranks of these hosts at once, if it was to be tried at all."""
    ranks = _ranks_of(world, good)
    collective = [own for own in judged if own.check.stage in _COLLECTIVE]
    asked = {own.check.code for own in collective if not own.skip or not own.skip.grounds}
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
