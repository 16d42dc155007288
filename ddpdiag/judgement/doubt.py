"""The evidence that the verdict needs and that is missing. Absence of evidence is never FIT."""

from collections.abc import Sequence
from itertools import islice

from ddpdiag.checks.api import Stage
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.world import World, without_gpu
from ddpdiag.judgement.ending import ended_by_ctrl_c
from ddpdiag.judgement.judged import Judged
from ddpdiag.model import Recording, Severity, Skip, StageLine, Status
from ddpdiag.text import count

# The limit of ranks that are listed, because a recording may claim millions of ranks.
_MOST_NAMED = 1024


def doubt_of(world: World, recording: Recording, judged: Sequence[Judged], stages: Sequence[StageLine]) -> str:
    """The reason why it is not known whether the world can train; empty if it is known."""
    errors = [f for own in judged for f in own.findings if f.severity is Severity.ERROR]
    if errors:
        return errors[0].title
    return _interruption(world, recording, judged, stages) or _unknown(world, recording, judged)


def _interruption(world: World, recording: Recording, judged: Sequence[Judged], stages: Sequence[StageLine]) -> str:
    """Such as "the run was interrupted after 3.3 s, in TRN001 (ddp-mnist); no problems found in launch, host".

    The text is empty if Ctrl-C did not end the run.
    """
    seconds = ended_by_ctrl_c(recording)
    if seconds is None:
        return ""
    cut = {outcome.code for outcome in recording.outcomes if outcome.told and outcome.status is Status.SKIPPED}
    own = next((j.check for j in judged if j.check.code in cut), None)
    came = f"{len(world.arrivals):,} of {count(world.size, 'rank')} had joined"
    where = f", in {own.code} ({own.name})" if own else "" if recording.trials else f", before any check: {came}"
    fine = [line.name for line in stages if line.status == "done" and line.severity in (None, Severity.NOTE)]
    so_far = f"; no problems found in {', '.join(fine)}" if fine else ""
    return f"the run was interrupted after {seconds:.1f} s{where}{so_far}"


def _unknown(world: World, recording: Recording, judged: Sequence[Judged]) -> str:
    """A clause about the first evidence that is missing; empty if none is."""
    for own in judged:
        if own.skip is not None and (not own.skip.grounds or lacks_named_backend(own.skip, world)):
            is_gpuless = own.skip.grounds or own.skip.reason == without_gpu(world)
            fix = "; make the job's GPUs visible to every rank, or test with --backend gloo" if is_gpuless else ""
            return f"{own.check.code} ({own.check.name}) could not run: {own.skip.reason}{fix}"
        if own.unreadable:
            return f"this version of ddpdiag cannot read the recorded data of {own.check.code}"
        for finding in own.not_seen():
            return finding.title
    if recording.end is None:
        return "the recording has no end"
    if missing := _without_lines(world, recording):
        return f"the recording lacks lines of {ranks_text(missing)}"
    tried = {outcome.code for outcome in recording.outcomes}
    for own in judged:
        if own.check.measure is not None and own.skip is None and own.check.code not in tried:
            return f"{own.check.code} ({own.check.name}) was not run"
    return "" if tested(recording, judged) else "no check could run"


def _without_lines(world: World, recording: Recording) -> Sequence[int]:
    """Ranks without any line, else ranks without an outcome in a trial: rank 0 writes one for each rank of a trial."""
    known = world.arrivals.keys() | {event.rank for event in recording.events}
    if silent := list(islice((rank for rank in range(world.size) if rank not in known), _MOST_NAMED)):
        return silent
    answered: dict[int, set[int]] = {}
    for outcome in recording.outcomes:
        answered.setdefault(outcome.trial, set()).add(outcome.rank)
    return sorted({rank for trial in recording.trials for rank in {*trial.ranks} - answered.get(trial.number, set())})


def tested(recording: Recording, judged: Sequence[Judged]) -> tuple[str, ...]:
    """The stages with a check that was DONE on some rank, or that judged the launch. Other stages are no evidence."""
    done = {outcome.code for outcome in recording.outcomes if outcome.status is Status.DONE}
    done |= {own.check.code for own in judged if own.check.measure is None and own.check.stage is Stage.LAUNCH}
    return tuple(dict.fromkeys(own.check.stage.value for own in judged if own.check.code in done))


def lacks_named_backend(skip: Skip, world: World) -> bool:
    """Whether the check was skipped because no GPU exists for the user's `--backend`, which is a failure."""
    return world.options.backend != "auto" and skip.reason == without_gpu(world)
