"""The verdict and its sentence."""

import signal
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Stage
from ddpdiag.checks.findings import Effect, Section, workarounds_text
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import World
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.doubt import tested
from ddpdiag.judgement.ending import ended_by_a_signal
from ddpdiag.judgement.hosts import slower_share
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import Finding, Recording, Scalar, Severity, Status, Verdict
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import count, rate_text, times_text

_SPEED = "training.samples_per_second"
# The sentence names up to this many slow ranks or hosts. The report has a list of all above the sentence.
_FEW = 4


class Conclusion(Struct, frozen=True):
    """The verdict with its exit code and sentence. `degraded`: the verdict is FIT, and a host or rank slows the job."""

    verdict: Verdict
    exit_code: int
    sentence: str
    degraded: bool = False


def conclude(
    world: World, recording: Recording, judged: Sequence[Judged], doubt: str, workarounds: Mapping[str, str | None]
) -> Conclusion:
    """Decide the verdict: UNFIT after an error that breaks jobs, UNKNOWN after a user's mistake or a doubt, else FIT.

    A run that was made for one check has the sentence of its section. `workarounds` are variables that the job needs.
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
    sentence += " The exit code is 1, because --strict was given." if code is ExitCode.UNFIT else ""
    return Conclusion(Verdict.FIT, code, sentence, degraded=any(any(j.slowing()) for j in judged))


def _backend_failed(world: World, recording: Recording) -> bool:
    """Whether a trial over the job's backend failed. The error that explains it may belong to another stage."""
    own = {t.number for t in recording.trials if t.params.get("backend") == world.backend and not t.may_fail}
    return any(o.trial in own and o.status not in (Status.DONE, Status.SKIPPED) for o in recording.outcomes)


def _failed(fatal: Sequence[Finding], own: Section) -> str:
    """The sentence of UNFIT for a run that was made for one check: the first error, then the section's sentence."""
    more = f" ({count(len(fatal) - 1, 'more error')})" if len(fatal) > 1 else ""
    meaning = f" {own.sentence}" if own.measured else ""
    return f"{fatal[0].title}{more}.{meaning}"


def exit_code(recording: Recording, code: ExitCode) -> int:
    """The exit code of the signal that ended the run, else `code`. Ctrl-C counts even if a rank was lost."""
    signals = [e.detail for e in recording.events if e.kind in TOLD_TO_LEAVE]
    if str(int(signal.SIGINT)) in signals:
        return ExitCode.INTERRUPTED
    return ExitCode.TERMINATED if ended_by_a_signal(recording) or (signals and code is ExitCode.UNKNOWN) else code


def who(world: World) -> str:
    """The world in words: "4 ranks on 2 hosts", or "host n7" in `ddpdiag host`."""
    if world.options.alone:
        return f"host {world.host_of(0)}"
    return f"{count(world.size, 'rank')} on {count(len(world.hosts), 'host')}"


def _unfit(world: World, fatal: Sequence[Finding], *, trained: bool) -> str:
    """The sentence of UNFIT: the first error that names a rank, host or link, with all hosts of errors of its code."""
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
    """The samples per second of the training, or None without a training."""
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
