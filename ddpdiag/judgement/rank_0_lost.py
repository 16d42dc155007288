"""A run that lost rank 0, from the records of the other ranks: what rank 0 would have recorded about its end."""

from collections.abc import Iterator, Set

from msgspec import structs

from ddpdiag.checks.hosts import ranks_text
from ddpdiag.model import End, Event, EventKind, Outcome, Recording, Status


def with_end(recording: Recording) -> Recording:
    """The recording with the losses and the end that no rank 0 recorded; unchanged where rank 0 was not lost."""
    reports = [event for event in recording.events if event.reporter is not None]
    if recording.end is not None or not reports:
        return recording
    reporters = {event.reporter for event in reports if event.reporter is not None}
    seconds = max(event.seconds for event in reports)
    records = f"the record of {ranks_text(sorted(reporters))}"
    return structs.replace(
        recording,
        events=(*recording.events, *_losses(recording, reporters, seconds)),
        outcomes=(*recording.outcomes, *_missing_outcomes(recording, {0, *recording.arrivals} - reporters)),
        end=End(seconds=seconds),
        notes=(*recording.notes, f"rank 0 was lost: this report is made from its last lines and {records}"),
    )


def _losses(recording: Recording, reporters: Set[int], seconds: float) -> Iterator[Event]:
    """Ranks that joined and did not record the loss of rank 0 were lost themselves, or had received a signal to end."""
    explained = _ranks(recording, EventKind.LOST) | _ranks(recording, EventKind.LEAVING)
    for rank, arrival in recording.arrivals.items():
        if rank not in reporters and rank not in explained:
            why = "it did not record the loss of rank 0"
            yield Event(kind=EventKind.LOST, rank=rank, seconds=seconds, host=arrival.place.host, detail=why)


def _ranks(recording: Recording, kind: EventKind) -> set[int | None]:
    return {event.rank for event in recording.events if event.kind is kind}


def _missing_outcomes(recording: Recording, gone: Set[int]) -> Iterator[Outcome]:
    """Their part in the trial that was running; a rank that reported a signal to end is not at fault."""
    known = {(outcome.trial, outcome.rank) for outcome in recording.outcomes}
    leaving = _ranks(recording, EventKind.LEAVING) - _ranks(recording, EventKind.LOST)
    for trial in recording.trials:
        for rank in trial.ranks:
            if rank in gone and (trial.number, rank) not in known:
                told = rank in leaving
                status, error = (Status.SKIPPED, "") if told else (Status.UNHEARD, "it was lost")
                yield Outcome(trial=trial.number, code=trial.code, rank=rank, status=status, error=error, told=told)
