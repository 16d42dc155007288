"""The run was not cut short.

The budget (`--budget`) was spent before every check could run, or the run was told to leave (Ctrl-C, a time limit of
the scheduler, a launcher that ends a job). What was seen until then is judged; what was not seen is unknown.

Fix: give more time with `--budget SECONDS`, or ask for less with `--stage` or `--select`.
"""

import signal
from collections.abc import Iterator

from ddpdiag.check import Check, Scope, Seen, Stage, nothing_planned
from ddpdiag.checks.run001 import Nothing
from ddpdiag.model import EventKind, Finding, Severity, Verdict

_NAMES = {str(int(known)): known.name for known in signal.Signals}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """The budget, and who was told to leave."""
    events = seen.recording.events
    for event in events:
        if event.kind is EventKind.BUDGET:
            yield seen.finding(
                "budget",
                Severity.ERROR,
                "the budget was spent",
                f"The budget of {seen.options.budget_seconds:g} s was spent at {event.seconds:.1f} s, {event.detail}.",
                remedy="Give more time with --budget, or ask for less with --stage or --select.",
            )
    leaving = sorted(e.rank for e in events if e.kind is EventKind.LEAVING and e.rank is not None)
    signals = [e for e in events if e.kind is EventKind.SIGNAL]
    if leaving or signals:
        first = next(e for e in events if e.kind in (EventKind.LEAVING, EventKind.SIGNAL))
        name = _NAMES.get(first.detail, "a signal")
        who = f"{len(leaving)} of {seen.world.size} ranks were" if leaving else "rank 0 was"
        yield seen.finding(
            "told",
            Severity.ERROR,
            f"the run was ended by {name}",
            f"{who} told to leave by {name} {first.seconds:.1f} s after the start; what came before it was judged.",
            remedy="Find out who ended the run: Ctrl-C, a time limit, or a launcher that saw another process die.",
        )


CHECK = Check(
    "RUN004",
    "completeness",
    Stage.RUN,
    Scope.WORLD,
    manual=__doc__ or "",
    judge=judge,
    data=Nothing,
    plan=nothing_planned,
    effect=Verdict.UNKNOWN,
)
