"""Findings on a failed trial: the blamed rank, its last step, the state of the other ranks, and the fix."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from ddpdiag.checks.api import Nothing, Seen
from ddpdiag.checks.blame import Blame, is_echo, missing_backend_errors, usual_step
from ddpdiag.checks.failure_evidence import crash_line, failure_evidence, state_evidence, state_text, waiting_text
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text, subject_text
from ddpdiag.checks.known_errors import KnownError, cause_in, explained_text
from ddpdiag.evidence.attribution import MISMATCH_FIX
from ddpdiag.model import Finding, Outcome, Scalar, Severity, Status, Trial
from ddpdiag.model.trial import is_first_use
from ddpdiag.text import begun, count

_VERBS = {Status.UNHEARD: "sent no result", Status.DIED: "died", Status.RAISED: "failed", Status.HUNG: "hung"}
_MISMATCH_FIX = (
    "Check that all ranks run the same ddpdiag and torch (`pip list | grep -i -E 'ddpdiag|torch'`). If the job itself "
    f"does this: {MISMATCH_FIX}"
)
_SHARED_CAUSE = (
    "The cause is something that the ranks share. Run `ddpdiag check --stage rendezvous,fabric`, which tests the "
    "network between their hosts, its firewall and the interface in use."
)
_SHARED_CAUSE_ON_HOST = (
    "The cause is something that the ranks share: look at the host's memory (`free -g`), /dev/shm (`df -h /dev/shm`) "
    "and kernel log (`dmesg -T`). With GPUs run `ddpdiag check --stage gpu,p2p`."
)
_ANOTHER_TORCH_FIX = "Install a torch that was built with this backend, or use another one (--backend)."


class Failure(NamedTuple):
    """The failure of one group of ranks in a trial. `causes` are findings of other checks that explain the failure.
    `no_rank_at_fault` says that the causes show that no rank is at fault, because they are about a workaround (P2P003)
    or a limit of the host (HST004)."""

    trial: Trial
    outcomes: Sequence[Outcome]
    blame: Blame
    causes: Sequence[Finding]
    no_rank_at_fault: bool = False

    @property
    def word(self) -> str:
        """The second part of the code of the finding on this failure, such as "hung"."""
        return "mismatch" if self.blame.variants else self.blame.status.value

    @property
    def is_explained(self) -> bool:
        """Whether findings of other checks explain the failure, so that no rank is blamed."""
        return self.no_rank_at_fault or (bool(self.causes) and not self.blame.ranks and not self.blame.variants)

    @property
    def trial_name(self) -> str:
        """The check's code with the trial's parameters, such as "COL001 (nccl)"."""
        params = ", ".join(map(str, self.trial.params.values()))
        return f"{self.trial.code} ({params})" if params else self.trial.code

    @property
    def first_failed(self) -> Outcome:
        """The outcome of the lowest rank that failed, whether or not it is blamed."""
        return next(o for o in self.outcomes if o.status not in (Status.DONE, Status.SKIPPED))


def failure_finding(seen: Seen[Nothing], failure: Failure) -> Finding:
    """The finding on a failure: a note if another error explains it, a warning if it does no harm, or an error."""
    if failure.is_explained:
        finding = _explained_finding(seen, failure)
    elif known := _known_error_finding(seen, failure):
        finding = known
    else:
        finding = _blaming_finding(seen, failure) if failure.blame.ranks else _undecided_finding(seen, failure)
    if finding.severity is Severity.ERROR and seen.is_harmless(failure.trial):
        why = f"This is a warning only: the job's backend is {seen.world.backend}, which works here."
        finding = structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {why}")
    return finding


def _blaming_finding(seen: Seen[Nothing], failure: Failure) -> Finding:
    """The finding on a failed trial in which the blamed ranks stopped the others."""
    _, outcomes, blame, *_ = failure
    first = next(o for o in outcomes if o.rank in blame.ranks)
    verb = "called a different collective than most ranks" if blame.variants else _VERBS[blame.status]
    title = f"{subject_text(seen, blame.ranks)} {verb} in {failure.trial_name}"
    return seen.finding(
        failure.word,
        title,
        f"{begun(title)}. {_failure_text(first, blame, outcomes)} {waiting_text(blame, outcomes)}".strip(),
        ranks=blame.ranks,
        evidence=_evidence(first, failure),
        fix=_fix(seen, first, blame),
    )


def _undecided_finding(seen: Seen[Nothing], failure: Failure) -> Finding:
    """The finding on a failed trial in which no rank can be blamed, because no rank differs from the others."""
    trial, outcomes, blame, *_ = failure
    failed_text = f"{failure.trial_name} {_VERBS[blame.status]}"
    shared = _SHARED_CAUSE if len(seen.world.host_names(trial.ranks)) > 1 else _SHARED_CAUSE_ON_HOST
    details = " ".join(filter(None, (waiting_text(blame, outcomes), _error_line(failure.first_failed))))
    return seen.finding(
        failure.word,
        f"{failed_text}; no rank can be blamed",
        f"{failed_text} on {count(len(trial.ranks), 'rank')}. No rank can be blamed: {blame.why}. {details}".strip(),
        evidence=_evidence(failure.first_failed, failure),
        fix=_MISMATCH_FIX if blame.variants else _ANOTHER_TORCH_FIX if missing_backend_errors(outcomes) else shared,
    )


def _known_error_finding(seen: Seen[Nothing], failure: Failure) -> Finding | None:
    """The finding on a trial that failed with a known error text; None if the text is not known. All blamed ranks must
    have the same known error. If no rank is blamed, the most common known error is taken. The finding shows the meaning
    of the error instead of the steps and stacks of ranks."""
    _, outcomes, blame, *_ = failure
    if blame.variants or blame.status not in (Status.RAISED, Status.DIED):
        return None
    suspects = [o for o in outcomes if o.status is blame.status and (not blame.ranks or o.rank in blame.ranks)]
    by_name: dict[str, list[tuple[Outcome, KnownError]]] = defaultdict(list)
    for outcome in suspects:
        if known := cause_in(outcome):
            by_name[known.name].append((outcome, known))
    most_common = max(by_name.values(), key=len, default=[])
    if not most_common or (blame.ranks and len(most_common) < len(suspects)):
        return None
    first, known = most_common[0]
    title = f"{subject_text(seen, blame.ranks)}: {known.title}" if blame.ranks else known.title
    ranks = [outcome.rank for outcome, _ in most_common]
    subject = begun(subject_text(seen, ranks) if seen.options.alone else ranks_text(ranks))
    verb = f"failed in {failure.trial_name} with"
    if blame.status is Status.DIED:
        verb = f"died in {failure.trial_name} ({first.error}) after the output"
    return seen.finding(
        failure.word,
        title,
        f'{title if blame.ranks else begun(title)}{known.meaning_tail} {subject} {verb} "{known.quote}".',
        ranks=blame.ranks,
        evidence=known.evidence | _evidence(first, failure),
        fix=known.fix,
    )


def _explained_finding(seen: Seen[Nothing], failure: Failure) -> Finding:
    """The finding on a failure that its `causes` explain: with the hosts and links of the causes, and without ranks. If
    a cause is an error, the failure is only its consequence, and the finding is a note."""
    trial, outcomes, blame, causes, _ = failure
    cause, first = causes[0], failure.first_failed
    why = "" if blame.ranks or blame.why == "; ".join(found.title for found in causes) else begun(f"{blame.why}.")
    error = "" if is_echo(first) or not first.error else f"{begun(explained_text(first.error)).rstrip('.')}."
    details = " ".join(filter(None, (waiting_text(blame, outcomes), why, error)))
    return seen.finding(
        failure.word,
        f"{failure.trial_name} {_VERBS[blame.status]} on {ranks_text(trial.ranks)}, as {cause.code} explains",
        details or f"The cause: {cause.title}.",
        severity=Severity.NOTE if any(found.severity is Severity.ERROR for found in causes) else None,
        hosts=tuple(dict.fromkeys(host for found in causes for host in found.hosts)),
        links=tuple(dict.fromkeys(link for found in causes for link in found.links)),
        evidence=_trial_evidence(first, trial) | state_evidence((), outcomes),
        fix=f"See {cause.code}.",
    )


def _failure_text(outcome: Outcome, blame: Blame, outcomes: Sequence[Outcome]) -> str:
    """Sentences on the failure of a blamed rank: the reason for the blame, its last step, and its process or error."""
    step = outcome.last_step
    if blame.variants:
        return f"{begun(blame.why)}." + (f" The last step of rank {outcome.rank} was '{step}'." if step else "")
    match outcome.status:
        case Status.HUNG:
            others = [o for o in outcomes if o.rank not in blame.ranks]
            others_step = (
                next((o.last_step for o in others if o.step_count == usual_step(others)), "") if others else ""
            )
            others_text = f", that of the other ranks is '{others_step}'" if others_step not in ("", step) else ""
            text = f"{begun(blame.why)}." + (f" Its last step is '{step}'{others_text}." if step else "")
            if process := outcome.process:
                text += f" Its process (pid {process.pid}) is {state_text(process)}"
                text += " and survived SIGKILL" if process.survived else ""
                if process.wchan and (process.survived or process.state == "D"):
                    text += f", waiting in {process.wchan}"
                text += f", in {process.stack[0]}" if process.stack else ""
                if (process.state or "?") in "TtD" and process.step_seconds is not None:
                    text += f", {process.step_seconds:.0f} s after that step began"
                text += "."
            return text
        case Status.UNHEARD:
            return f"{begun(outcome.error or 'the reason is not known')}."
        case _:
            error = _error_line(outcome).rstrip(".")
            begin = "It was" if error.startswith("killed by") else "Its error:"
            return f"{begin} {error}" + (f" (last step '{step}')." if step else ".")


def _error_line(outcome: Outcome) -> str:
    return outcome.error.splitlines()[0] if outcome.error else ""


def _trial_evidence(outcome: Outcome, trial: Trial) -> dict[str, Scalar | list[Scalar]]:
    """The rank's last step, its deadline in seconds, and the trial's number in the recording."""
    seconds = trial.limit_seconds if is_first_use(outcome.last_step) else trial.deadline_seconds
    return {"last_step": outcome.last_step, "deadline_seconds": round(seconds, 1), "trial": trial.number}


def _evidence(outcome: Outcome, failure: Failure) -> dict[str, Scalar | list[Scalar]]:
    """The evidence of a failure: the trial, steps and stacks of ranks, and the last output and process in `outcome`."""
    evidence = _trial_evidence(outcome, failure.trial)
    # The last output is often the text of the exception, which the message already shows.
    if (output := crash_line(outcome.detail)) and output != _error_line(outcome):
        evidence["output"] = output
    evidence |= failure_evidence(failure.blame.ranks, failure.outcomes)
    if outcome.process is not None:
        evidence |= {"pid": outcome.process.pid, "state": outcome.process.state, "wchan": outcome.process.wchan}
    return evidence


def _fix(seen: Seen[Nothing], outcome: Outcome, blame: Blame) -> str:
    """The fix for a failure, by the status of a blamed rank and the state of its process ("T": stopped)."""
    hosts, is_one_host = seen.world.host_names(blame.ranks), seen.options.alone
    if outcome.process is not None and outcome.process.survived:
        host = hosts[0] if hosts else "?"
        return f"Reboot {host}, or reset the device that process {outcome.process.pid} waits for; it cannot be killed."
    if blame.variants:
        return _MISMATCH_FIX
    names, several = names_text(hosts) or "?", len(blame.ranks) > 1
    who = names if is_one_host else ranks_text(blame.ranks)
    match outcome.status, outcome.process.state if outcome.process else None:
        case Status.HUNG, "T":
            pid = outcome.process.pid if outcome.process and not several else "PID"
            return (
                f"Run `kill -CONT {pid}` on {names}. Find what stopped the process: a debugger, a suspended job, or a "
                "SIGSTOP."
            )
        case Status.HUNG, "D":
            return f"Run `dmesg -T` on {names}: a driver or file system there does not answer."
        case Status.DIED, _ if "SIGXCPU" in _error_line(outcome):
            return (
                f"A process on {names} used all the processor time that its limit allows (`ulimit -t` shows it). Run "
                "`ulimit -t unlimited` in the job script before the ranks start."
            )
        case Status.DIED | Status.UNHEARD, _:
            last_line = crash_line(outcome.detail).rstrip(".")
            output = f" Its last output: {last_line}." if last_line else ""
            return (
                f"Run `dmesg -T | grep -i -E 'oom|killed|segfault'` on {names}, and read the output of "
                f"{who}.{output} After `oom` ask for more memory (Slurm: `--mem`). Otherwise run again, and "
                f"{leave_out(hosts)} if it fails again."
            )
        case Status.RAISED, _:
            error = f"errors that {who} report" if several else f"error that {who} reports"
            waited = f" The other ranks only waited for {'them' if several else 'it'}."
            return f"Fix the error on {names}." if is_one_host else f"Fix the {error} on {names}.{waited}"
        case _ if is_one_host:
            return f"Run `dmesg -T` on {names}, and run its last step there by hand (`nvidia-smi -q`)."
        case _ if several:
            return (
                f"Run `py-spy dump --pid PID` for {ranks_text(blame.ranks)} on {names}; any of them can stop the "
                "others, which only waited. The report's evidence has their stacks at the deadline."
            )
        case _:
            return (
                f"Find what rank {outcome.rank} on {names} waits for: the report's evidence has its stack at the "
                "deadline, and `py-spy dump --pid PID` shows it in the job. The other ranks only waited for it. If "
                f"the same rank hangs again, {leave_out(hosts)}."
            )
