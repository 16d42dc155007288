"""The run was complete.

This check reports measurements that are missing because the budget, a deadline or a signal ended the run too early.

Findings:

Fix: give more time with `--budget SECONDS`, or ask for less with `--stage` or `--select`.

Confirm by hand: Run it again on an idle host with twice the budget; `uptime` and `/proc/pressure/cpu` show whether
other processes use it.

Sources: none: ddpdiag measures its own time.
"""

import signal
from collections.abc import Iterator

from ddpdiag.checks.api import Check, Nothing, Scope, Seen, Stage
from ddpdiag.checks.blame import is_progressing, is_starting, is_unfinished
from ddpdiag.checks.findings import Effect, FindingSpec
from ddpdiag.checks.hosts import subject_text
from ddpdiag.checks.run.trials import failures
from ddpdiag.model import EventKind, Finding, Severity, Status
from ddpdiag.model.recording import SIGNAL_EVENTS
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

# Errors of these checks are about ranks for which the other ranks waited.
_CHECKS_OF_RANKS = ("RUN001", "RUN002", "RUN003")
_CTRL_C = str(int(signal.SIGINT))
_SIGNAL_NAMES = {str(int(number)): number.name for number in signal.Signals}


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """Findings about the budget, about checks that did not finish in time, and about a signal that ended the run."""
    events = seen.recording.events
    # With such an error the finding is a note, because the others waited for ranks that hung, died or never joined.
    findings = (finding for code in _CHECKS_OF_RANKS for finding in seen.findings_of(code))
    cause = next((finding for finding in findings if finding.severity is Severity.ERROR), None)
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
            is_about_run=True,
        )
    yield from _unfinished(seen)
    if signal_events := [event for event in events if event.kind in SIGNAL_EVENTS]:
        first = signal_events[0]
        if any(event.detail == _CTRL_C for event in signal_events):
            yield seen.finding(
                "told",
                "the run was interrupted",
                f"Ctrl-C (SIGINT) ended it {first.seconds:.1f} s after the start. The report covers what was measured "
                "before.",
                severity=Severity.NOTE,
                is_about_run=True,
            )
            return
        name = _SIGNAL_NAMES.get(first.detail, "a signal")
        signalled = sum(event.kind is EventKind.LEAVING for event in signal_events)
        who = f"{signalled} of {count(seen.world.size, 'rank')}" if signalled else subject_text(seen, [0])
        yield seen.finding(
            "told",
            f"the run was ended by {name}",
            f"{begun(who)} received {name} {first.seconds:.1f} s after the start. The report covers what was measured "
            "before.",
            severity=Severity.ERROR,
            fix="If neither you nor a time limit (`scontrol show job $SLURM_JOB_ID`) ended the run, look in the "
            "launcher's output for a process that failed before: torchrun then ends all others.",
            is_about_run=True,
        )


def _unfinished(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each check in which a rank still made progress at its deadline, if nothing else explains it."""
    reported: set[str] = set()
    for trial, outcomes, blame, _, no_rank_at_fault in failures(seen):
        # Lack of time is not the cause if a workaround (P2P003) or a limit of the host (HST004) explains the failure.
        may_finish = not no_rank_at_fault and is_unfinished(trial, blame, outcomes, lenient=seen.options.alone)
        if trial.code in reported or not may_finish or seen.is_harmless(trial):
            continue
        reported.add(trial.code)
        hung = (o for o in outcomes if o.status is Status.HUNG)
        first = next(o for o in hung if is_progressing(o, trial, lenient=seen.options.alone))
        at_step = f" at '{first.last_step}'" if first.last_step else ""
        is_first_use = is_starting(first, trial)
        was_shortened = trial.is_shortened or is_first_use
        state = "was still making progress" if is_progressing(first, trial) else "was still busy"
        if is_first_use:
            state = "was still in its first use of the GPU or of NCCL, which may take 60 s on slow hosts,"
        seconds = trial.limit_seconds if is_first_use else trial.deadline_seconds
        budget_text, option = "", f"--set {trial.code}.deadline_seconds={2 * trial.deadline_seconds:.0f}"
        if was_shortened:
            budget_text = ", all that was left of the time budget (--budget)"
            option = f"`--budget {2 * seen.options.budget_seconds:g}`"
        yield seen.finding(
            "unfinished",
            f"{trial.code} did not finish in time",
            f"Check {trial.code} timed out after {seconds:.1f} s{budget_text}. "
            f"{begun(subject_text(seen, [first.rank]))} {state}{at_step}.",
            evidence={"trial": trial.number, "last_step": first.last_step},
            fix=f"Run again with {option}, or find what keeps {seen.world.host_name(first.rank)} busy (`top`).",
        )


CHECK: Check[Nothing] = Check(__name__, "RUN004", "completeness", Stage.RUN, Scope.WORLD)
