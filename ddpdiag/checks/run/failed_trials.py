"""Findings on a failed trial: the blamed rank, its last step, the state of the other ranks, and the fix."""

from collections import defaultdict
from collections.abc import Sequence

from ddpdiag.checks.api import Nothing, Seen
from ddpdiag.checks.blame import Blame, front, is_echo, without_backend
from ddpdiag.checks.failure_evidence import bundle, last_words, standings, state_text, waits_text
from ddpdiag.checks.hosts import leave_out, names_text, ranks_text, who_text
from ddpdiag.checks.known_errors import KnownError, cause_in, with_meaning
from ddpdiag.model import Finding, Outcome, Scalar, Status, Trial
from ddpdiag.model.trial import is_first_use
from ddpdiag.text import begun, count

_VERBS = {Status.UNHEARD: "sent no result", Status.DIED: "died", Status.RAISED: "failed", Status.HUNG: "hung"}
_MISMATCH_FIX = (
    "Check that all ranks run the same ddpdiag and torch (`pip list | grep -i -E 'ddpdiag|torch'`). If the job itself "
    "does this, find why a rank takes another branch or has data of another shape: with "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares every collective before it runs."
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


def blaming_finding(seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome]) -> Finding:
    """The finding on a failed trial in which the blamed ranks stopped the others."""
    first = next(o for o in outcomes if o.rank in blame.ranks)
    verb = "called a different collective than most ranks" if blame.sides else _VERBS[blame.status]
    title = f"{who_text(seen, blame.ranks)} {verb} in {_trial_name(trial)}"
    return seen.finding(
        word_of(blame),
        title,
        f"{begun(title)}. {_failure_text(first, blame, outcomes)} {waits_text(blame, outcomes)}".strip(),
        ranks=blame.ranks,
        evidence=_evidence(first, trial, blame, outcomes),
        fix=_fix(seen, first, blame),
    )


def word_of(blame: Blame) -> str:
    """The second part of the code of the finding on a failure, such as "hung"."""
    return "mismatch" if blame.sides else blame.status.value


def _trial_name(trial: Trial) -> str:
    """The check's code with the trial's parameters, such as "COL001 (nccl)"."""
    return f"{trial.code}" + (f" ({', '.join(str(v) for v in trial.params.values())})" if trial.params else "")


def undecided_finding(seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome]) -> Finding:
    """The finding on a failed trial in which no rank can be blamed, because no rank differs from the others."""
    name = _trial_name(trial)
    first = next(o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED))
    verb = _VERBS[blame.status]
    shared = _SHARED_CAUSE if len(seen.world.hosts_of(trial.ranks)) > 1 else _SHARED_CAUSE_ON_HOST
    details = " ".join(filter(None, (waits_text(blame, outcomes), _error_line(first))))
    return seen.finding(
        word_of(blame),
        f"{name} {verb}; no rank can be blamed",
        f"{name} {verb} on {count(len(trial.ranks), 'rank')}. No rank can be blamed: {blame.why}. {details}".strip(),
        evidence=_evidence(first, trial, blame, outcomes),
        fix=_MISMATCH_FIX if blame.sides else _ANOTHER_TORCH_FIX if without_backend(outcomes) else shared,
    )


def known_error_finding(seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome]) -> Finding | None:
    """The finding on a trial that failed with a known error text; None if the text is not known. All blamed ranks must
    have the same known error. If no rank is blamed, the most common one is taken. The finding shows the meaning of the
    error and not the steps and stacks of ranks."""
    if blame.sides or blame.status not in (Status.RAISED, Status.DIED):
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
    title = f"{who_text(seen, blame.ranks)}: {known.title}" if blame.ranks else known.title
    ranks = [outcome.rank for outcome, _ in most_common]
    subject = begun(who_text(seen, ranks) if seen.options.alone else ranks_text(ranks))
    failed = f"failed in {_trial_name(trial)} with"
    if blame.status is Status.DIED:
        failed = f"died in {_trial_name(trial)} ({first.error}) after the output"
    return seen.finding(
        word_of(blame),
        title,
        f'{title if blame.ranks else begun(title)}{known.rest} {subject} {failed} "{known.quote}".',
        ranks=blame.ranks,
        evidence=known.evidence | _evidence(first, trial, blame, outcomes),
        fix=known.fix,
    )


def explained_finding(
    seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome], causes: Sequence[Finding]
) -> Finding:
    """The finding on a trial whose failure the findings `causes` explain. It has their hosts and links, but no rank."""
    cause = causes[0]
    first = next(o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED))
    why = "" if blame.ranks or blame.why == "; ".join(found.title for found in causes) else begun(f"{blame.why}.")
    error = "" if is_echo(first) or not first.error else f"{begun(with_meaning(first.error)).rstrip('.')}."
    details = " ".join(filter(None, (waits_text(blame, outcomes), why, error)))
    return seen.finding(
        word_of(blame),
        f"{_trial_name(trial)} {_VERBS[blame.status]} on {ranks_text(trial.ranks)}, as {cause.code} explains",
        details or f"The cause: {cause.title}.",
        hosts=tuple(dict.fromkeys(host for found in causes for host in found.hosts)),
        links=tuple(dict.fromkeys(link for found in causes for link in found.links)),
        evidence=_trial_evidence(first, trial) | standings((), outcomes),
        fix=f"See {cause.code}.",
    )


def _failure_text(outcome: Outcome, blame: Blame, outcomes: Sequence[Outcome]) -> str:
    """Sentences on the failure of a blamed rank: the reason for the blame, its last step, and its process or error."""
    at = f" at '{outcome.last_step}'" if outcome.last_step else ""
    if blame.sides:
        return f"{begun(blame.why)}.{at and f' The last step of rank {outcome.rank} was{at[3:]}.'}"
    match outcome.status:
        case Status.HUNG:
            others = [o for o in outcomes if o.rank not in blame.ranks]
            waiting = next((o.last_step for o in others if o.step_count == front(others)), "") if others else ""
            beyond = f", that of the other ranks is '{waiting}'" if waiting and waiting != outcome.last_step else ""
            steps = f" Its last step is '{outcome.last_step}'{beyond}." if at else ""
            if process := outcome.process:
                steps += f" Its process (pid {process.pid}) is {state_text(process)}"
                steps += " and survived SIGKILL" if process.survived else ""
                if process.wchan and (process.survived or process.state == "D"):
                    steps += f", waiting in {process.wchan}"
                steps += f", in {process.stack[0]}" if process.stack else ""
                if (process.state or "?") in "TtD" and process.step_seconds is not None:
                    steps += f", {process.step_seconds:.0f} s after that step began"
                steps += "."
            return f"{begun(blame.why)}.{steps}"
        case Status.UNHEARD:
            return f"{begun(outcome.error or 'the reason is not known')}."
        case _:
            words = _error_line(outcome).rstrip(".")
            was = "It was" if words.startswith("killed by") else "Its error:"
            return f"{was} {words}{at and f' (last step{at[3:]})'}."


def _error_line(outcome: Outcome) -> str:
    return outcome.error.splitlines()[0] if outcome.error else ""


def _trial_evidence(outcome: Outcome, trial: Trial) -> dict[str, Scalar | list[Scalar]]:
    """The rank's last step, its deadline in seconds, and the trial's number in the recording."""
    first_use = is_first_use(outcome.last_step)
    return {
        "last_step": outcome.last_step,
        "deadline_seconds": round(trial.limit_seconds if first_use else trial.deadline_seconds, 1),
        "trial": trial.number,
    }


def _evidence(
    outcome: Outcome, trial: Trial, blame: Blame, outcomes: Sequence[Outcome]
) -> dict[str, Scalar | list[Scalar]]:
    """The evidence of a failure: the trial, the worker's last output, steps and stacks of ranks, and the process."""
    evidence = _trial_evidence(outcome, trial)
    # The last output is often the text of the exception, which the message already shows.
    if (output := last_words(outcome.detail)) and output != _error_line(outcome):
        evidence["output"] = output
    evidence |= bundle(blame.ranks, outcomes)
    if outcome.process is not None:
        evidence |= {"pid": outcome.process.pid, "state": outcome.process.state, "wchan": outcome.process.wchan}
    return evidence


def _fix(seen: Seen[Nothing], outcome: Outcome, blame: Blame) -> str:
    """The fix for a failure, by the status of a blamed rank and the state of its process ("T": stopped)."""
    hosts, is_one_host = seen.world.hosts_of(blame.ranks), seen.options.alone
    if outcome.process is not None and outcome.process.survived:
        host = hosts[0] if hosts else "?"
        return f"Reboot {host}, or reset the device that process {outcome.process.pid} waits for; it cannot be killed."
    if blame.sides:
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
            words = last_words(outcome.detail).rstrip(".")
            output = f" Its last output: {words}." if words else ""
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
