"""The doubt: the reason why evidence is not sufficient for a verdict. Absence of evidence is never FIT."""

from collections.abc import Sequence
from itertools import islice

from ddpdiag.checks.api import Stage
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.world import World, no_gpu_reason
from ddpdiag.judgement.check_judgements import Judgements
from ddpdiag.judgement.ending import ctrl_c_seconds
from ddpdiag.model import Recording, Severity, Skip, StageSummary, Status
from ddpdiag.text import count

# A recording may claim millions of ranks. At most this many are listed.
_MAX_LISTED_RANKS = 1024


def doubt_of(world: World, recording: Recording, judgements: Judgements, stages: Sequence[StageSummary]) -> str:
    """The reason why it is unknown whether the world can train, as a clause; empty if it is known."""
    errors = [f for each in judgements for f in each.findings if f.severity is Severity.ERROR]
    if errors:
        return errors[0].title
    return _interruption(world, recording, judgements, stages) or _missing_evidence(world, recording, judgements)


def _interruption(world: World, recording: Recording, judgements: Judgements, stages: Sequence[StageSummary]) -> str:
    """A clause about the time and the check at which Ctrl-C ended the run; empty if Ctrl-C did not end it."""
    seconds = ctrl_c_seconds(recording)
    if seconds is None:
        return ""
    codes = {outcome.code for outcome in recording.outcomes if outcome.interrupted and outcome.status is Status.SKIPPED}
    check = next((each.check for each in judgements if each.check.code in codes), None)
    joined = f"{len(world.arrivals):,} of {count(world.size, 'rank')} had joined"
    position = (
        f", in {check.code} ({check.name})" if check else "" if recording.trials else f", before any check: {joined}"
    )
    passed = [stage.name for stage in stages if stage.status == "done" and stage.severity in (None, Severity.NOTE)]
    passed_text = f"; no problems found in {', '.join(passed)}" if passed else ""
    return f"the run was interrupted after {seconds:.1f} s{position}{passed_text}"


def _missing_evidence(world: World, recording: Recording, judgements: Judgements) -> str:
    """A clause about the first missing evidence; empty if no evidence is missing."""
    for each in judgements:
        if each.skip is not None and (not each.skip.is_inapplicable or misses_requested_backend(each.skip, world)):
            lacks_gpus = each.skip.is_inapplicable or each.skip.reason == no_gpu_reason(world)
            fix = "; make the job's GPUs visible to every rank, or test with --backend gloo" if lacks_gpus else ""
            return f"{each.check.code} ({each.check.name}) could not run: {each.skip.reason}{fix}"
        if each.unreadable:
            return f"this version of ddpdiag cannot read the recorded data of {each.check.code}"
        for finding in each.unchecked_findings():
            return finding.title
    if recording.end is None:
        return "the recording has no end"
    if missing := _ranks_without_lines(world, recording):
        return f"the recording lacks lines of {ranks_text(missing)}"
    codes = {outcome.code for outcome in recording.outcomes}
    for each in judgements:
        if each.check.measure is not None and each.skip is None and each.check.code not in codes:
            return f"{each.check.code} ({each.check.name}) was not run"
    return "" if tested_stages(recording, judgements) else "no check could run"


def _ranks_without_lines(world: World, recording: Recording) -> Sequence[int]:
    """The ranks without any line or, if every rank has lines, the ranks without an outcome in one of their trials."""
    recorded = world.arrivals.keys() | {event.rank for event in recording.events}
    if silent := list(islice((rank for rank in range(world.size) if rank not in recorded), _MAX_LISTED_RANKS)):
        return silent
    ranks_of: dict[int, set[int]] = {}
    for outcome in recording.outcomes:
        ranks_of.setdefault(outcome.trial, set()).add(outcome.rank)
    return sorted({rank for trial in recording.trials for rank in {*trial.ranks} - ranks_of.get(trial.number, set())})


def tested_stages(recording: Recording, judgements: Judgements) -> tuple[str, ...]:
    """The names of the stages with a check that was DONE on some rank, or that judged the launch without a trial."""
    done = {outcome.code for outcome in recording.outcomes if outcome.status is Status.DONE}
    done |= {each.check.code for each in judgements if each.check.measure is None and each.check.stage is Stage.LAUNCH}
    return tuple(dict.fromkeys(each.check.stage.value for each in judgements if each.check.code in done))


def misses_requested_backend(skip: Skip, world: World) -> bool:
    """Whether the check was skipped because no GPU exists for the `--backend` that the user requested."""
    return world.options.backend != "auto" and skip.reason == no_gpu_reason(world)
