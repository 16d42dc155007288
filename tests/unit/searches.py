"""Whole searches of FAB001 and FAB002, in which a function gives what each group of ranks reaches."""

from collections.abc import Callable, Sequence

from msgspec import Raw, structs
from seen import seen_of

from ddpdiag.bandwidth import busbw_factor
from ddpdiag.checks.api import Check, Seen
from ddpdiag.checks.fabric.rounds import Data
from ddpdiag.checks.rendezvous import methods
from ddpdiag.codec import encode
from ddpdiag.model import Outcome, RunOptions, Status, Trial
from ddpdiag.stats import samples

# Bytes per second of a group of ranks; None if its all-reduce does not end.
Rate = Callable[[Sequence[int]], float | None]

USUAL = 1e9
_BYTES = 1 << 24


def searched(
    check: Check[Data], rate: Rate, *, ranks: int, ranks_per_node: int, most_rounds: int = 100, **options: object
) -> Seen[Data]:
    """The run after the search, or after `most_rounds` of it."""
    own = RunOptions(backend="gloo", **options)  # type: ignore[arg-type]
    seen = seen_of(methods.CHECK, {}, size=ranks, ranks_per_node=ranks_per_node, options=own).of(check)
    while len(seen.trials) < most_rounds and (planned := check.plan(seen)):
        trial = structs.replace(planned[0], number=len(seen.recording.trials))
        outcomes = [_outcome(trial, rank, group, rate(group)) for group in trial.groups for rank in group]
        recording = structs.replace(
            seen.recording, trials=(*seen.recording.trials, trial), outcomes=(*seen.recording.outcomes, *outcomes)
        )
        seen = Seen(seen.world, check, recording)
    return seen


def _outcome(trial: Trial, rank: int, group: Sequence[int], rate: float | None) -> Outcome:
    if rate is None:
        return Outcome(trial=trial.number, code=trial.code, rank=rank, status=Status.HUNG)
    seconds = _BYTES * busbw_factor("all_reduce", len(group)) / rate
    data = Raw(encode(Data(len(group), _BYTES, samples([seconds]))))
    return Outcome(trial=trial.number, code=trial.code, rank=rank, status=Status.DONE, data=data)
