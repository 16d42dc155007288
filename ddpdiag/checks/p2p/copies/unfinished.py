"""Findings about copies that did not end, or ended their process; and about those that were not tried.

P2P002 judges the failures of its own trials (`Trial.may_fail`), so all of them are reported here, except the loss of a
whole rank (RUN002).
"""

import re
from collections.abc import Iterator, Sequence

from ddpdiag.checks.api import Seen
from ddpdiag.checks.failure_evidence import last_words, state_text
from ddpdiag.checks.hosts import leave_out, names_text
from ddpdiag.checks.known_errors import cause_in
from ddpdiag.checks.p2p.copies.data import RankCopies
from ddpdiag.checks.p2p.copies.judge import ACS, GUESS
from ddpdiag.model import EventKind, Finding, Outcome, Scalar, Status
from ddpdiag.model.measurements import NO_PEERS_LEFT, Copies
from ddpdiag.probes.gpu.nvml import EXCLUSIVE
from ddpdiag.text import count

_GPU = re.compile(r"GPU (\d+)")
_VERBS = {
    Status.HUNG: "does not end",
    Status.DIED: "ended its process",
    Status.RAISED: "failed",
    Status.UNHEARD: "gave no result",
}


def failed(seen: Seen[Copies]) -> tuple[Outcome, ...]:
    """Trials that failed by themselves, in order."""
    return tuple(o for o in seen.outcomes if o.status in _VERBS and not o.told)


def ends(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """One finding for each step at which a rank stopped."""
    by_rank = {copies.rank: copies for copies in all_copies}
    lost = {event.rank for event in seen.recording.events if event.kind is EventKind.LOST}
    for outcome in failed(seen):
        if outcome.rank in lost:
            continue
        copies = by_rank.get(outcome.rank)
        if NO_PEERS_LEFT in outcome.error:
            continue  # `refused` says so
        step = copies.renumbered(outcome.at) if copies is not None else outcome.at
        if was_going_on(seen, outcome):
            yield _unfinished(seen, outcome, step)
        elif (
            copies is not None
            and "busy or unavailable" in outcome.error
            and any(card.health.compute_mode in EXCLUSIVE for card in copies.cards.values())
        ):
            name = copies.host.name
            yield seen.finding(
                "taken",
                "pairs of GPUs were not tested: each GPU allows one process",
                f"{name}: '{step}' was refused, because its GPUs allow one process each (compute mode 'exclusive "
                "process', GPU008) and the ranks already use them. Only the collectives test these pairs.",
                evidence=_evidence(outcome, step),
                fix="Nothing to do for the job. To have each pair measured, run `nvidia-smi -c DEFAULT` as root on "
                f"{name}.",
            )
        else:
            yield _end(seen, outcome, copies, step)


def was_going_on(seen: Seen[Copies], outcome: Outcome) -> bool:
    """Was it still taking its steps, none of which takes that long? Then its time was too short."""
    process = outcome.process
    if outcome.status is not Status.HUNG or process is None or (process.state or "") in "TtD":
        return False
    return process.step_seconds is not None and process.step_seconds < seen.number("hung_seconds")


def _end(seen: Seen[Copies], outcome: Outcome, copies: RankCopies | None, step: str) -> Finding:
    node = seen.world.host_of(outcome.rank)
    gpus = tuple(dict.fromkeys(map(int, _GPU.findall(outcome.at)))) if copies is not None else ()
    direct = len(gpus) == 2 and "host" not in outcome.at
    what = f"'{step}'" if step else "copying between GPUs"
    verb = _VERBS[outcome.status]
    who = f": {', '.join(map(copies.full_label, gpus))}" if copies is not None and gpus else ""
    others = ""
    if copies is not None and copies.jobs:
        fine, left = len(copies.pairs), copies.jobs - copies.done
        others = f" {count(fine, 'other pair')} of GPUs were copied to the end." if fine else ""
        others += f" {left} of {copies.jobs} steps of this test were not done." if left > 1 else ""
    fix = _fix(outcome, node, direct=direct)
    # Of memory, a card speaks of a job's model and batch, and none takes part here.
    known = None if "out of memory" in outcome.error else cause_in(outcome)
    return seen.finding(
        outcome.status.value,
        f"{what} {verb} on {node}",
        f"{what} {verb} on {node} (rank {outcome.rank}){who}.{_story(outcome)}{others}",
        ranks=(copies.ranks_of(gpus) if copies is not None else ()) or (outcome.rank,),
        hosts=(node,),
        gpus=copies.uuids(gpus) if copies is not None else (),
        evidence=_evidence(outcome, step),
        fix=fix,
        guess=GUESS if GUESS in fix else "",
        known=known,
    )


def _story(outcome: Outcome) -> str:
    """How it ended."""
    process = outcome.process
    if outcome.status is Status.HUNG and process is not None:
        survived = " and survived SIGKILL" if process.survived else ""
        where = f", in {process.stack[0]}" if process.stack else ""
        since = f" after {process.step_seconds:.0f} s in that step" if process.step_seconds is not None else ""
        return f" Its process (pid {process.pid}) was still {state_text(process)}{survived}{where}{since}."
    words = outcome.error.partition("\n")[0].rstrip(".")
    return f" {words}." if words else ""


def _evidence(outcome: Outcome, step: str) -> dict[str, Scalar | list[Scalar]]:
    process = outcome.process
    return {
        "last_step": step,
        "rank": outcome.rank,
        "trial": outcome.trial,
        "seconds": round(outcome.seconds, 1),
        **({"pid": process.pid, "state": process.state, "wchan": process.wchan} if process else {}),
        **({"output": said} if (said := last_words(outcome.detail)) else {}),
    }


def _fix(outcome: Outcome, node: str, *, direct: bool) -> str:
    process = outcome.process
    if process is not None and process.survived:
        return f"Reboot {node}, or reset the GPU that process {process.pid} waits for; the process cannot be killed."
    if process is not None and process.state == "T":
        return f"Run `kill -CONT {process.pid}` on {node}. Find what stopped it: a debugger, a suspended job, or a "
        "SIGSTOP."
    if "out of memory" in outcome.error:
        return f"End the process that uses the GPU's memory on {node} (`nvidia-smi`, `fuser -v /dev/nvidia*` as root)."
    look = f"Run `dmesg -T | grep -i xid` on {node}. If it shows one of these GPUs, {leave_out([node])}."
    return f"{look} {GUESS} {ACS}" if direct else f"{look} Otherwise reset the GPU as root, or reboot {node}."


def _unfinished(seen: Seen[Copies], outcome: Outcome, step: str) -> Finding:
    node = seen.world.host_of(outcome.rank)
    return seen.finding(
        "unmeasured",
        "not all copies between GPUs were measured",
        f"Rank {outcome.rank} on {node} was still making progress after {outcome.seconds:.1f} s, at '{step}'. The "
        "other copies were not measured.",
        ranks=(outcome.rank,),
        evidence=_evidence(outcome, step),
        fix=f"Run again with more time: --budget {_more(seen.options.budget_seconds)} --set "
        f"{seen.check.code}.deadline_seconds={_more(outcome.seconds)}. Or find what keeps {node} busy (`top`).",
        of_the_run=True,
    )


def refused(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Links that CUDA had no peer mappings left for, which is no fault of theirs."""
    # In older recordings such a copy ended its process.
    ended = {outcome.rank for outcome in failed(seen) if NO_PEERS_LEFT in outcome.error}
    for copies in all_copies:
        if copies.refused or copies.rank in ended:
            name, number = copies.host.name, len(copies.gpus)
            tried = f"{len(copies.pairs)} of {number * (number - 1)} pairs of its {number} GPUs were tried"
            yield seen.finding(
                "peers",
                "pairs of GPUs were not tested: CUDA allows 8 peers",
                f"{name}: {tried}. CUDA allows a GPU only 8 peers in one process ('{NO_PEERS_LEFT}').",
                hosts=(name,),
                evidence={"not_tested": [copies.link_label(link) for link in copies.refused]},
                fix="Nothing to do: the collectives test the pairs that a job uses.",
            )


def _more(seconds: float) -> int:
    return round(2 * seconds)


def untried(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """What there was no time for, where nothing failed."""
    unwell = {outcome.rank for outcome in failed(seen)}
    for copies in all_copies:
        left = copies.jobs - copies.done
        if left > 0 and copies.rank not in unwell:
            yield seen.finding(
                "unmeasured",
                "not all copies between GPUs were measured",
                f"{copies.host.name}: the time was over before {left} of {copies.jobs} steps of this test, so not all "
                "copies were measured.",
                hosts=(copies.host.name,),
                evidence={"done": copies.done, "of": copies.jobs},
                fix=f"Run again with more time: --budget {_more(seen.options.budget_seconds)} --set "
                f"{seen.check.code}.deadline_seconds={_more(seen.check.deadline)}.",
                of_the_run=True,
            )


def nothing(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Hosts that should have GPUs of which torch shows none: the checks of the stage gpu find and blame the cause."""
    found = dict.fromkeys(copies.host for copies in all_copies if not copies.gpus and not copies.jobs)
    hosts = [host for host in found if not any(copies.gpus for copies in all_copies if copies.host == host)]
    if hosts:
        names, most = [host.name for host in hosts], max(host.gpus for host in hosts)
        yield seen.finding(
            "unmeasured",
            f"no copies were tested on {names_text(names, 2)}, where torch shows no GPU",
            f"{names_text(names)}: torch shows no GPU, up to {most} per host expected from CUDA_VISIBLE_DEVICES or the "
            "driver's list, so it is not known whether copies work.",
            evidence={"hosts": list(names[:64]), "torch": 0, "expected": most},
            fix="Run `ddpdiag check --select GPU001,GPU002`, which finds the cause. To train on CPUs, set "
            "CUDA_VISIBLE_DEVICES= (empty).",
            of_the_run=True,
        )


def apart(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Hosts whose ranks see GPUs of their own: one process has no pairs of them."""
    nodes = list(dict.fromkeys(copies.host.name for copies in all_copies if not copies.alone))
    if nodes:
        yield seen.finding(
            "apart",
            "pairs of GPUs were not tested: ranks see different GPUs",
            f"{names_text(nodes)}: each rank sees only some of the host's GPUs, so no process can copy between all of "
            "them. Their paths to the host's memory were measured; only the collectives test the pairs.",
            evidence={"hosts": [*nodes]},
            fix="To have each pair measured, make all GPUs visible to every rank (Slurm: --gpu-bind=none).",
        )
