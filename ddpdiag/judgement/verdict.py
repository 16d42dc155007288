"""The verdict and its sentence."""

import signal
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Stage
from ddpdiag.checks.findings import Effect, Section, workarounds_text
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.world import World
from ddpdiag.errors import ExitCode
from ddpdiag.judgement.check_judgements import Judgements, slower_share
from ddpdiag.judgement.doubt import tested_stages
from ddpdiag.judgement.ending import was_ended_by_signal
from ddpdiag.model import Finding, Recording, Scalar, Severity, Status, Verdict
from ddpdiag.model.recording import SIGNAL_EVENTS
from ddpdiag.text import count, rate_text, times_text

_SPEED = "training.samples_per_second"  # the figure's name
# The sentence names at most this many slow ranks or hosts. The report lists all of them above the sentence.
_MAX_NAMED = 4


class Conclusion(Struct, frozen=True):
    """The verdict, its exit code and its sentence. `degraded`: the verdict is FIT, but a host or rank slows the job."""

    verdict: Verdict
    exit_code: int
    sentence: str
    degraded: bool = False


def conclude(
    world: World, recording: Recording, judgements: Judgements, doubt: str, workarounds: Mapping[str, str | None]
) -> Conclusion:
    """Decide the verdict: UNFIT after an error that breaks jobs, UNKNOWN after a user's mistake or a doubt, else FIT.

    If a check contributed a section (a benchmark, a training by strategies), the sentence of the verdict is the
    section's. `workarounds` are the variables that the job needs.
    """
    section = next((each.contribution.section for each in judgements if each.contribution.section is not None), None)
    errors = [(each, finding) for each in judgements for finding in each.findings if finding.severity is Severity.ERROR]
    mistakes = [finding for each, finding in errors if each.effect_of(finding) is Effect.USAGE]
    unfit_errors = [(each.check.stage, finding) for each, finding in errors if each.effect_of(finding) is Effect.UNFIT]
    if fatal := [finding for _, finding in unfit_errors]:
        needed = {Stage.COLLECTIVE, Stage.TRAINING, Stage.RUN}
        can_train = _training_speed(judgements) is not None and needed.isdisjoint(stage for stage, _ in unfit_errors)
        can_train = can_train and not _backend_failed(world, recording)
        sentence = _unfit(world, fatal, can_train=can_train) if section is None else _unfit_section(fatal, section)
        return Conclusion(Verdict.UNFIT, exit_code(recording, ExitCode.UNFIT), sentence)
    if mistakes:
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.USAGE), f"{mistakes[0].title}.")
    if doubt:
        question = "Whether {} can train" if section is None else section.question
        sentence = f"{question.format(world_text(world))} is not known: {doubt}."
        sentence += f" {section.sentence}" if section is not None and section.has_answer else ""
        return Conclusion(Verdict.UNKNOWN, exit_code(recording, ExitCode.UNKNOWN), sentence)
    warnings = sum(f.severity is Severity.WARNING for each in judgements for f in each.findings)
    code = ExitCode.UNFIT if warnings and recording.header.options.strict else ExitCode.FIT
    sentence = _fit(world, recording, judgements, warnings, workarounds) if section is None else section.sentence
    sentence += " The exit code is 1, because --strict was given." if code is ExitCode.UNFIT else ""
    return Conclusion(Verdict.FIT, code, sentence, degraded=any(any(each.slowing_findings()) for each in judgements))


def _backend_failed(world: World, recording: Recording) -> bool:
    """Whether a trial over the job's backend failed. The error that explains the failure may be of another stage."""
    numbers = {t.number for t in recording.trials if t.params.get("backend") == world.backend and not t.may_fail}
    return any(o.trial in numbers and o.status not in (Status.DONE, Status.SKIPPED) for o in recording.outcomes)


def _unfit_section(fatal: Sequence[Finding], section: Section) -> str:
    """The sentence of the verdict UNFIT for a run with a section: the first error, then the section's sentence."""
    more = f" ({count(len(fatal) - 1, 'more error')})" if len(fatal) > 1 else ""
    result = f" {section.sentence}" if section.has_answer else ""
    return f"{fatal[0].title}{more}.{result}"


def exit_code(recording: Recording, code: ExitCode) -> int:
    """The exit code of the signal that ended the run, else `code`. Ctrl-C counts even if a rank was lost."""
    signals = [e.detail for e in recording.events if e.kind in SIGNAL_EVENTS]
    if str(int(signal.SIGINT)) in signals:
        return ExitCode.INTERRUPTED
    return ExitCode.TERMINATED if was_ended_by_signal(recording) or (signals and code is ExitCode.UNKNOWN) else code


def world_text(world: World) -> str:
    """The world in words: "4 ranks on 2 hosts", or "host n7" in `ddpdiag host`."""
    if world.options.alone:
        return f"host {world.host_name(0)}"
    return f"{count(world.size, 'rank')} on {count(len(world.hosts), 'host')}"


def _unfit(world: World, fatal: Sequence[Finding], *, can_train: bool) -> str:
    """The sentence of UNFIT: the first error that blames a rank, host or link, and the hosts of errors of its code."""
    quoted = next((f for f in fatal if f.ranks or f.hosts or f.links), fatal[0])
    same_code = [finding for finding in fatal if finding.code == quoted.code]
    hosts = tuple(dict.fromkeys(host for finding in same_code for host in finding.hosts))
    if len(same_code) == 1 or len(hosts) == 1 or not all(finding.hosts for finding in same_code):
        same_code, reason = [quoted], quoted.title
    else:
        share = f"{len(hosts):,} of {count(len(world.hosts), 'host')} fail"
        reason = f"{share}: {names_text(hosts)} ({quoted.code}: {quoted.title})"
    other_count = len(fatal) - len(same_code)
    more = f" ({count(other_count, 'more error')})" if other_count else ""
    verb = "can train, but with errors" if can_train else "cannot train"
    return f"{world_text(world)} {verb}: {reason}{more}."


def _training_speed(judgements: Judgements) -> Scalar:
    """The samples per second of the training, or None if no training was measured."""
    return next((each.contribution.figures[_SPEED] for each in judgements if _SPEED in each.contribution.figures), None)


def _fit(
    world: World, recording: Recording, judgements: Judgements, warnings: int, workarounds: Mapping[str, str | None]
) -> str:
    figures = {name: value for each in judgements for name, value in each.contribution.figures.items()}
    samples_per_s = _training_speed(judgements)
    options = recording.header.options
    is_partial = bool(options.stages or options.skip_stages or options.select or options.ignore)
    if samples_per_s is None:
        stages = ", ".join(tested_stages(recording, judgements))
        text = f"{world_text(world)}: no {'errors' if warnings else 'problems'} found in the stages that ran ({stages})"
    else:
        speed_text = f", {samples_per_s:,.0f} samples/s" if isinstance(samples_per_s, int | float) else ""
        busbw = figures.get(f"all_reduce.{world.backend}.busbw_bytes_per_s", figures.get("fallback.busbw_bytes_per_s"))
        busbw_text = f", all-reduce {rate_text(busbw)}" if isinstance(busbw, int | float) else ""
        text = f"{world_text(world)} can train with DDP over {world.backend}{speed_text}{busbw_text}"
        if is_partial:
            text += "; only the selected checks ran"
    if workarounds:
        text += f"; only {workarounds_text(workarounds)}"
    if options.alone:
        text += "; no other host was tested"
    elif world.size == 1:
        text += "; there is one rank only, so communication was not tested"
    if slowing_findings := [finding for each in judgements for finding in each.slowing_findings()]:
        text += f"; but {_slowed_text(world, slowing_findings)}"
    if warnings:
        text += f"; {count(warnings, 'warning')}"
    return text + "."


def _slowed_text(world: World, findings: Sequence[Finding]) -> str:
    """Describe the slow ranks or hosts, such as "rank 3 on n1 makes the job up to 2.5 times slower"."""
    ranks = sorted({rank for finding in findings for rank in finding.ranks})
    hosts = tuple(dict.fromkeys(name for each in findings for name in each.hosts or world.host_names(each.ranks)))
    names = ""
    if all(finding.ranks for finding in findings) and len(ranks) <= _MAX_NAMED:
        subject, number = f"{ranks_text(ranks)} on {names_text(hosts)}", len(ranks)
    elif len(world.hosts) == len(hosts) == 1:
        subject, number = hosts[0], 1
    else:
        subject, number = f"{len(hosts):,} of {count(len(world.hosts), 'host')}", len(hosts)
        names = f": {names_text(hosts)}" if number <= _MAX_NAMED else ""
    shares = [share for finding in findings if (share := slower_share(finding)) is not None]
    verb_ending = "" if number != 1 else "s"
    if not shares:
        return f"{subject} slow{verb_ending} the job down{names}"
    return f"{subject} make{verb_ending} the job up to {times_text(1 / max(1 - max(shares), 1e-3))} slower{names}"
