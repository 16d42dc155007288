"""Every trial ended by itself.

A trial that raised, crashed or ran into its deadline on some rank. Blame goes first to ranks of which nothing was
heard, then to those whose process died, then to those that failed by themselves, then to those hung short of the step
that most ranks had reached, or that posted fewer collectives: the others only wait for them. "Connection closed by
peer" is an echo of somebody else's end and blames nobody. Where RDZ002, RDZ003 or RDZ004 saw that hosts of the trial do
not reach each other, a rank that waits elsewhere than the others proves nothing, and what these name is named; so it is
where all hang alike, and RDZ004 saw a way so slow that what they posted needs half of the trial's time or more. A trial
that failed over gloo is a warning where the job takes another backend, which works.

Findings and their causes:
- unheard: a rank's supervisor sent no result. died: the process ended by a signal or an exit code, without an answer.
- raised: an exception, whose text is shown. If all ranks raised the same, none of them is to blame.
- unsupported: the torch of no rank knows the backend that was asked for (exit code 2).
- hung: the trial passed its deadline, which is that of the check (`--set CODE.deadline_seconds=SECONDS`), or what was
  left of the budget. A rank that was still going on then has not hung: RUN004 tells of it. Nor has `ddpdiag host`
  where the budget left it less than the check's own time, unless it is stuck in the kernel: some drivers start slowly.
- mismatch: ranks posted different collectives under the same number (see below).

The finding shows for each rank the last step, the state of the process (T is stopped, D is stuck in the kernel or a
driver, R is running), where in the code it stood, and the collective that it posted last, from torch's flight recorder
(gloo and nccl; a rank that is stopped or holds the GIL cannot say). Collectives of a group are counted, so that the
same number is the same collective on all ranks: RUN003.mismatch names who posted another one, or another size, than
most, because its path through the code or its shapes differ.

Fix: start with the rank that is named; its own error and stack say more than those of the ranks that waited for it.

Confirm by hand: While it hangs, `py-spy dump --pid PID` on each host, and `cat /proc/PID/status /proc/PID/stack` as
root; TORCH_FR_BUFFER_SIZE=2000 and `torchfrtrace DIR` for the collectives.

Sources: torch's flight recorder (docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html); gloo's
transport/tcp/pair.cc; NCCL user guide, RAS; proc_pid_stat(5), process states.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from msgspec import structs

from ddpdiag.blame import Blame, blamed, front, is_echo, unfinished, without_backend
from ddpdiag.check import Check, Scope, Seen, Stage, nothing_planned
from ddpdiag.checks import col001, p2p003
from ddpdiag.checks.bundle import bundle, last_words, state_text, waits_text
from ddpdiag.checks.causes import between, causes, slow_ways, too_slow
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.run001 import Nothing
from ddpdiag.errors import UnknownBackend
from ddpdiag.model import EventKind, Finding, Outcome, Scalar, Severity, Status, Trial

D = TypeVar("D")

_VERBS = {
    Status.UNHEARD: "sent no result",
    Status.DIED: "died",
    Status.RAISED: "failed",
    Status.HUNG: "hung",
}
_MISMATCH = (
    "Look for what differs between the ranks: data, shapes, a branch taken on some ranks only, versions of the code. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective before it runs."
)
_SHARED = "Look at what the ranks share: the network between their hosts, its firewall, the interface in use."
_SHARED_HERE = (
    "Look at what the ranks share: their host's memory, /dev/shm and kernel log, and the ways between its GPUs."
)
_ANOTHER_TORCH = "Install a torch that was built with this backend, or name another one with --backend."


class Failure(NamedTuple):
    """A group that failed in a trial; `causes` are findings of other checks that explain it.

    `bypassed` says that these found a way around, which shows that no rank is at fault by itself.
    """

    trial: Trial
    outcomes: Sequence[Outcome]
    blame: Blame
    causes: Sequence[Finding]
    bypassed: bool = False


def judge(seen: Seen[Nothing]) -> Iterator[Finding]:
    """One finding for each way in which the same ranks failed, with the first trial in which they did."""
    told: set[tuple[str, tuple[int, ...], bool]] = set()
    unsupported = _unsupported(seen)
    yield from unsupported.values()
    for trial, outcomes, blame, own, bypassed in failures(seen):
        if trial.params.get("backend") in unsupported:
            continue
        way = (_word(blame), blame.ranks, seen.is_excused(trial))
        if way not in told and not unfinished(trial, blame, outcomes, patient=seen.options.alone):
            told.add(way)
            explained = bypassed or (bool(own) and not blame.ranks and not blame.sides)
            tell = _explained if explained else _finding
            yield _excused(seen, trial, tell(seen, trial, blame, outcomes, own))


def _unsupported(seen: Seen[Nothing]) -> dict[Scalar, Finding]:
    """A finding for each backend that the torch of no rank knows: a name that was mistyped, and nobody's fault."""
    asked: dict[Scalar, dict[int, str]] = {}
    outcomes: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in seen.recording.outcomes:
        if outcome.error:
            outcomes[outcome.trial].append(outcome)
    for trial in seen.recording.trials:
        said = without_backend(outcomes[trial.number], (UnknownBackend,))
        if said and len(said) == len(trial.ranks):
            asked.setdefault(trial.params.get("backend"), said)
    return {
        backend: seen.finding(
            "unsupported",
            Severity.ERROR,
            next(iter(said.values())),
            f"No rank has a backend of the name {backend}, so nothing was tried over it.",
            remedy="Give one of these with --backend, or leave it out; or install what brings the backend to torch.",
            of_the_run=True,
        )
        for backend, said in asked.items()
    }


def _way(seen: Seen[D], trial: Trial) -> tuple[Finding, ...]:
    """What P2P003 found to get around the failure of the job's backend, as it was in this trial."""
    known = seen.of(p2p003.CHECK)
    if trial.code != col001.CHECK.code or trial.params.get("backend") != seen.world.backend:
        return ()
    return tuple(p2p003.judge(known)) if p2p003.works_with_exports(known) else ()


def failures(seen: Seen[D]) -> Iterator[Failure]:
    """What failed in each group of each trial, unless a lost rank explains it."""
    lost = {e.rank for e in seen.recording.events if e.kind is EventKind.LOST and e.rank is not None}
    trials = {trial.number: trial for trial in seen.recording.trials if not trial.may_fail}
    known = {(o.trial, o.rank): o for o in seen.recording.outcomes if o.trial in trials}
    known_causes = causes(seen) if trials else ()
    known_slow = slow_ways(seen) if trials else ()
    for trial in trials.values():
        for group in trial.groups:
            outcomes = [known[trial.number, rank] for rank in group if (trial.number, rank) in known]
            way = _way(seen, trial)
            own = way or between(known_causes, frozenset(seen.world.nodes_of(group)))
            blame = blamed(outcomes, "; ".join(cause.title for cause in own))
            if blame is None or (lost and _is_loss(lost.intersection(group), blame, outcomes)):
                continue  # RUN002 names the lost
            if not own and not blame.ranks and blame.status is Status.HUNG:
                nodes = frozenset(seen.world.nodes_of(group))
                if slow := too_slow(between(known_slow, nodes), trial, outcomes):
                    blame, own = structs.replace(blame, why=slow.why), (slow.cause,)
            yield Failure(trial, outcomes, blame, own, bool(way))


def _is_loss(lost: set[int], blame: Blame, outcomes: Sequence[Outcome]) -> bool:
    """Did it fail because of the lost? A rank that gave an outcome of its own was lost later."""
    if blame.ranks and lost.issuperset(blame.ranks):
        return True
    silent = lost - {o.rank for o in outcomes if o.status not in (Status.UNHEARD, Status.SKIPPED)}
    return bool(silent) and (not blame.ranks or all(map(is_echo, _failed(outcomes))))


def _excused(seen: Seen[Nothing], trial: Trial, finding: Finding) -> Finding:
    """A warning where the job goes another way, and that way works."""
    if not seen.is_excused(trial):
        return finding
    own = f"The job's own backend is {seen.world.backend}, which works here, and that is what counts."
    return structs.replace(finding, severity=Severity.WARNING, message=f"{finding.message} {own}")


def _failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]


def _finding(
    seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome], own: Sequence[Finding]
) -> Finding:
    what = _what(trial)
    if not blame.ranks:
        return _undecided(seen, trial, blame, outcomes)
    first = next(o for o in outcomes if o.rank in blame.ranks)
    who = f"{_who(seen, blame.ranks)} {_verb(blame)}"
    return seen.finding(
        _word(blame),
        Severity.ERROR,
        f"{who} in {what}",
        f"{who} in {what}: {_story(first, blame, outcomes)} {waits_text(blame, outcomes)}".strip(),
        ranks=blame.ranks,
        evidence=_evidence(first, trial, blame, outcomes),
        remedy=_remedy(first, blame, seen.world.node_of(first.rank), alone=seen.options.alone),
    )


def _word(blame: Blame) -> str:
    return "mismatch" if blame.sides else blame.status.value


def _verb(blame: Blame) -> str:
    return "posted another collective than most" if blame.sides else _VERBS[blame.status]


def _what(trial: Trial) -> str:
    return f"{trial.code}" + (f" ({', '.join(str(v) for v in trial.params.values())})" if trial.params else "")


def _undecided(seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome]) -> Finding:
    what = _what(trial)
    first = next(o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED))
    verb = _VERBS[blame.status]
    shared = _SHARED if len(seen.world.nodes_of(trial.ranks)) > 1 else _SHARED_HERE
    told = " ".join(filter(None, (waits_text(blame, outcomes), _own_words(first))))
    return seen.finding(
        _word(blame),
        Severity.ERROR,
        f"{what} {verb}, and nobody can be blamed",
        f"{what} {verb} on {len(trial.ranks)} ranks, and nobody stands out: {blame.why}. {told}".strip(),
        evidence=_evidence(first, trial, blame, outcomes),
        remedy=_MISMATCH if blame.sides else _ANOTHER_TORCH if without_backend(outcomes) else shared,
    )


def _explained(
    seen: Seen[Nothing], trial: Trial, blame: Blame, outcomes: Sequence[Outcome], own: Sequence[Finding]
) -> Finding:
    """The way between the ranks is known to be broken, so who waits where proves nothing."""
    what = _what(trial)
    first = next(o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED))
    told = " ".join(filter(None, (waits_text(blame, outcomes), _own_words(first))))
    return seen.finding(
        _word(blame),
        Severity.ERROR,
        f"{what} {_VERBS[blame.status]}: {own[0].title}",
        f"{what} {_VERBS[blame.status]} on {len(trial.ranks)} ranks, as {own[0].code} explains: {blame.why}. "
        f"{told}".strip(),
        nodes=tuple(dict.fromkeys(node for cause in own for node in cause.nodes)),
        links=tuple(dict.fromkeys(link for cause in own for link in cause.links)),
        evidence=_evidence(first, trial, blame, outcomes),
        remedy=f"See {own[0].code}." if own[0].env else own[0].remedy,
    )


def _who(seen: Seen[Nothing], ranks: Sequence[int]) -> str:
    nodes = seen.world.nodes_of(ranks)
    return f"{ranks_text(ranks)} on {', '.join(nodes[:8]) or '?'}"


def _story(outcome: Outcome, blame: Blame, outcomes: Sequence[Outcome]) -> str:
    at = f" at '{outcome.at}'" if outcome.at else ""
    if blame.sides:
        return f"{blame.why}{at and f' (last step{at[3:]})'}."
    match outcome.status:
        case Status.HUNG:
            others = [o for o in outcomes if o.rank not in blame.ranks]
            waiting = next((o.at for o in others if o.step == front(others)), "") if others else ""
            beyond = f", the others at '{waiting}'" if waiting and waiting != outcome.at else ""
            stands = f"; it stands{at}{beyond}" if at else ""
            return f"{blame.why}{stands}{_state(outcome)}."
        case Status.UNHEARD:
            return f"{blame.why}: {outcome.error or 'no outcome'}."
        case _:
            return f"{_own_words(outcome).rstrip('.')}{at and f' (last step{at[3:]})'}."


def _state(outcome: Outcome) -> str:
    process = outcome.process
    if process is None:
        return ""
    state = f"; pid {process.pid} is {state_text(process)}"
    if process.survived:
        state += " and survived SIGKILL" + (f", waiting in {process.wchan}" if process.wchan else "")
    return state + (f", in {process.stack[0]}" if process.stack else "")


def _own_words(outcome: Outcome) -> str:
    return outcome.error.splitlines()[0] if outcome.error else ""


def _evidence(
    outcome: Outcome, trial: Trial, blame: Blame, outcomes: Sequence[Outcome]
) -> dict[str, Scalar | list[Scalar]]:
    evidence: dict[str, Scalar | list[Scalar]] = {
        "trial": trial.number,
        "deadline_seconds": round(trial.deadline_seconds, 1),
        "last_step": outcome.at,
    }
    if outcome.process is not None:
        evidence |= {"pid": outcome.process.pid, "state": outcome.process.state, "wchan": outcome.process.wchan}
    evidence |= bundle(blame.ranks, outcomes)
    if outcome.detail:
        evidence["output"] = last_words(outcome.detail)
    return evidence


def _remedy(outcome: Outcome, blame: Blame, node: str, *, alone: bool) -> str:
    if outcome.process is not None and outcome.process.survived:
        return f"Reboot {node}, or reset the device that pid {outcome.process.pid} waits for: it cannot be killed."
    if blame.sides:
        return _MISMATCH
    match outcome.status, outcome.process.state if outcome.process else None:
        case Status.HUNG, "T":
            return f"Find out who stopped the process on {node} (a debugger, a job suspend, SIGSTOP)."
        case Status.HUNG, "D":
            return f"Look at the kernel log of {node}: a driver or file system does not answer."
        case Status.DIED, _:
            return f"Look at the kernel log of {node} (out of memory, segfault) and at the output above."
        case Status.RAISED, _:
            return f"Mend the cause that rank {outcome.rank} gives on {node}; the others only waited for it."
        case _ if alone:
            return f"Look at the kernel log of {node}, and run there by hand what it stands at (`nvidia-smi -q`)."
        case _:
            return f"Look at rank {outcome.rank} on {node} first; the others only waited for it."


CHECK = Check(
    "RUN003",
    "trials",
    Stage.RUN,
    Scope.WORLD,
    manual=__doc__ or "",
    judge=judge,
    data=Nothing,
    plan=nothing_planned,
)
