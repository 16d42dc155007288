"""How far a run came that somebody ended by Ctrl-C."""

import signal
from collections.abc import Sequence

from ddpdiag.checks.world import World
from ddpdiag.judgement.judged import Judged
from ddpdiag.judgement.stages import by_code, stages_of
from ddpdiag.model import Outcome, Recording, Severity, Status
from ddpdiag.model.recording import TOLD_TO_LEAVE


def interruption(world: World, recording: Recording, judged: Sequence[Judged]) -> str:
    """Such as "the run was interrupted after 3.3 s, in TRN001 (ddp-mnist); launch, host were fine so far".

    Empty where no Ctrl-C ended it.
    """
    seconds = ended_by_ctrl_c(recording)
    if seconds is None:
        return ""
    cut = {outcome.code for outcome in recording.outcomes if _is_cut(outcome)}
    own = next((j.check for j in judged if j.check.code in cut), None)
    where = f", in {own.code} ({own.name})" if own is not None else "" if recording.trials else _at_the_door(world)
    stages = stages_of(world, recording, judged, by_code(recording))
    fine = [line.name for line in stages if line.status == "done" and line.severity in (None, Severity.NOTE)]
    so_far = f"; {', '.join(fine)} {'was' if len(fine) == 1 else 'were'} fine so far" if fine else ""
    return f"the run was interrupted after {seconds:.1f} s{where}{so_far}"


def _at_the_door(world: World) -> str:
    return f", before any check: {len(world.arrivals):,} of {world.size:,} ranks had come"


def ended_by_ctrl_c(recording: Recording) -> float | None:
    """When, in seconds since the start, or None."""
    told = (e.seconds for e in recording.events if e.kind in TOLD_TO_LEAVE and e.detail == str(int(signal.SIGINT)))
    return min(told, default=None)


def _is_cut(outcome: Outcome) -> bool:
    return outcome.told and outcome.status is Status.SKIPPED
