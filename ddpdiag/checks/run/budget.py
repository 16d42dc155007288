"""The run was complete.

What was measured is judged; what was not measured is unknown.

Findings:

Fix: give more time with `--budget SECONDS`, or ask for less with `--stage` or `--select`.

Confirm by hand: Run it again on an idle host with twice the budget; `uptime` and `/proc/pressure/cpu` show whether
other processes use it.

Sources: none: ddpdiag measures its own time.
"""

import signal
from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.blame import goes_on, is_starting, unfinished
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.hosts import who_text
from ddpdiag.checks.run.trials import failures
from ddpdiag.model import EventKind, Finding, Severity, Status
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import begun, count

FINDINGS = {
    "budget": FindingSpec.error(
        "too little of the budget (`--budget`) was left for the next check; a note where a rank that hung, crashed or "
        "never joined explains why time ran out.",
        effect=Effect.UNKNOWN,
    ),
    "unfinished": FindingSpec.error(
        "a rank was still making progress at the deadline of a check: it had taken a step in the last twentieth of "
        "that time; or it used a core, in the import of torch or because the budget had left less time than usual; or "
        "the budget left less than 30 s for a CUDA context, a communicator or the first collective. Blame would be a "
        "guess.",
        effect=Effect.UNKNOWN,
    ),
    "told": FindingSpec(
        "a signal ended the run: a time limit of the scheduler, a launcher that ends a job, or Ctrl-C (only a note, "
        "since the user pressed it).",
        effect=Effect.UNKNOWN,
    ),
}

# Errors of these checks are about ranks for which the others waited.
_WAITED_FOR = ("RUN001", "RUN002", "RUN003")
_CTRL_C = str(int(signal.SIGINT))
_NAMES = {str(int(known)): known.name for known in signal.Signals}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Findings about the budget, about checks that did not finish in time, and about a signal that ended the run."""
    events = seen.recording.events
    # With such an error the finding is a note: the wait for ranks that hung, crashed or never joined took the time.
    errors = [own for code in _WAITED_FOR for own in seen.findings_of(code) if own.severity is Severity.ERROR]
    cause = errors[0] if errors else None
    for event in (event for event in events if event.kind is EventKind.BUDGET):
        yield seen.finding(
            "budget",
            "the time limit was reached before all checks ran",
            f"{event.seconds:.1f} s of the run's {seen.options.budget_seconds:g} s (--budget) were used "
            f"{event.detail}; what did not run is not part of the result."
            + (f" {cause.code} explains why time ran out: {cause.title}." if cause else ""),
            severity=Severity.NOTE if cause else None,
            fix=f"Fix {cause.code} first."
            if cause
            else f"Run again with --budget {2 * seen.options.budget_seconds:g}, or run fewer checks (--stage, "
            "--select).",
            of_the_run=True,
        )
    yield from _unfinished(seen)
    leaving = sorted(e.rank for e in events if e.kind is EventKind.LEAVING and e.rank is not None)
    signals = [e for e in events if e.kind is EventKind.SIGNAL]
    if leaving or signals:
        first = next(e for e in events if e.kind in TOLD_TO_LEAVE)
        if any(e.detail == _CTRL_C for e in events if e.kind in TOLD_TO_LEAVE):
            # The user pressed Ctrl-C; the verdict shows how far the run was.
            yield seen.finding(
                "told",
                "the run was interrupted",
                f"Ctrl-C (SIGINT) ended it {first.seconds:.1f} s after the start. The report covers what was measured "
                "before.",
                severity=Severity.NOTE,
                of_the_run=True,
            )
            return
        name = _NAMES.get(first.detail, "a signal")
        who = f"{len(leaving)} of {count(seen.world.size, 'rank')}" if leaving else who_text(seen, [0])
        yield seen.finding(
            "told",
            f"the run was ended by {name}",
            f"{begun(who)} received {name} {first.seconds:.1f} s after the start. The report covers what was measured "
            "before.",
            severity=Severity.ERROR,
            fix="If neither you nor a time limit (`scontrol show job $SLURM_JOB_ID`) ended the run, look in the "
            "launcher's output "
            "for a process that failed before: torchrun then ends all others.",
            of_the_run=True,
        )


def _unfinished(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each check with a rank that was still making progress at the deadline."""
    reported: set[str] = set()
    for trial, outcomes, blame, _, bypassed in failures(seen):
        patient = seen.options.alone
        # A collective that works with other variables (P2P003) did not fail for lack of time.
        wants_time = not bypassed and unfinished(trial, blame, outcomes, patient=patient)
        if trial.code in reported or not wants_time or seen.is_harmless(trial):
            continue
        reported.add(trial.code)
        first = next(o for o in outcomes if o.status is Status.HUNG and goes_on(o, trial, patient=patient))
        at = f" at '{first.at}'" if first.at else ""
        starting = is_starting(first, trial)
        hurried = trial.hurried or starting
        still = "was still making progress" if goes_on(first, trial) else "was still busy"
        if starting:
            still = "was still in its first use of the GPU or of NCCL, which may take 60 s on slow hosts,"
        seconds = trial.limit_seconds if starting else trial.deadline_seconds
        left = ", all that was left of the time budget (--budget)" if hurried else ""
        yield seen.finding(
            "unfinished",
            f"{trial.code} did not finish in time",
            f"Check {trial.code} timed out after {seconds:.1f} s{left}. "
            f"{begun(who_text(seen, [first.rank]))} {still}{at}.",
            evidence={"trial": trial.number, "last_step": first.at},
            fix=(
                f"Run again with `--budget {2 * seen.options.budget_seconds:g}`"
                if hurried
                else f"Run again with --set {trial.code}.deadline_seconds={2 * trial.deadline_seconds:.0f}"
            )
            + f", or find what keeps {seen.world.host_of(first.rank)} busy (`top`).",
        )


CHECK: Check[Nothing] = Check(__name__, "RUN004", "completeness", Stage.RUN, Scope.WORLD)
