"""Texts about a failed trial: the state of each rank, the collective in which ranks wait, and stacks."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from ddpdiag.checks.blame import Blame, is_echo
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.evidence.collectives import collective_text, last_collective
from ddpdiag.model import Outcome, ProcessState, Scalar, Status
from ddpdiag.text import begun, count

_STATUS_WORDS = {Status.UNHEARD: "sent no result"}
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "stuck in the kernel or a driver",
    "R": "running",
    "S": "sleeping",
    "Z": "dead",
}
# Limits that keep the evidence readable: lines (one for all ranks in a state), stacks, characters of output.
_MAX_LINES = 64
_MAX_STACKS = 4
_MAX_CHARACTERS = 600
# C++ and Python begin a crash report with these words, and then list frames and modules.
_CRASH_STARTS = ("what():", "Fatal Python error")
# Torch and NCCL print these texts in healthy runs, too: gloo's since torch 2.8; without NumPy a warning with its line.
_HARMLESS_OUTPUT = (
    "[Gloo] Rank ",
    "NCCL DIAG ",
    "UserWarning: Failed to initialize NumPy",
    "_conversion_method_template(device=",
)
# This frame and its callers belong to ddpdiag's worker and are always the same, so stacks omit them.
_WORKER_FRAME = "_measure (worker.py:"


def state_text(process: ProcessState) -> str:
    """Describe the state of a process, such as "sleeping"."""
    return _STATES.get(process.state or "", f"in state {process.state}" if process.state else "in an unknown state")


def crash_line(output: str) -> str:
    """Return the line of an output that shows why the process ended: the crash message, else the last line."""
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip("^~ ") and not any(words in line for words in _HARMLESS_OUTPUT)
    ]
    message = next((line for line in lines if line.startswith(_CRASH_STARTS)), lines[-1] if lines else "")
    return message[:_MAX_CHARACTERS]


def waiting_text(blame: Blame, outcomes: Sequence[Outcome]) -> str:
    """Say in which collective ranks wait and what blamed ranks posted last, or how collectives differ. May be empty."""
    if blame.variants:
        parts = [
            f"{ranks_text(ranks)} posted {collective_text(collective)}" for collective, ranks in blame.variants[:4]
        ]
        return f"{begun('; '.join(parts))}." if not blame.ranks else ""
    others = [o for o in outcomes if o.rank not in blame.ranks and o.status in (Status.HUNG, Status.RAISED)]
    ends = {o.rank: end for o in others if (end := last_collective(o.collectives)) is not None}
    if not ends:
        return ""
    awaited, _ = max(Counter(ends.values()).items(), key=lambda item: (item[1], item[0].seq))
    waiting = tuple(rank for rank, end in ends.items() if end == awaited)
    verb = ("waits" if len(waiting) == 1 else "wait") if any(o.status is Status.HUNG for o in others) else "waited"
    if not blame.ranks:
        return f"{begun(ranks_text(waiting))} {verb} in {collective_text(awaited)}."
    whom, whose, who = ("it", "its", "it has") if len(blame.ranks) == 1 else ("them", "their", "they have")
    own = [last_collective(o.collectives) for o in outcomes if o.rank in blame.ranks and o.collectives is not None]
    furthest = max((end for end in own if end is not None), key=lambda end: end.seq, default=None)
    if not own:
        far = ""
    elif furthest is None:
        far = f"; {who} posted no collective"
    else:
        far = f"; {whose} last one was {collective_text(furthest)}"
    return f"{begun(ranks_text(waiting))} {verb} for {whom} in {collective_text(awaited)}{far}."


def failure_evidence(blamed_ranks: Collection[int], outcomes: Sequence[Outcome]) -> dict[str, Scalar | list[Scalar]]:
    """Return the evidence of a failure: each rank's state, and stacks of blamed ranks and of a waiting rank."""
    groups = [group for _, group in _groups_by_state(blamed_ranks, outcomes)]
    return {**state_evidence(blamed_ranks, outcomes), **_stacks(blamed_ranks, groups)}


def _groups_by_state(blamed_ranks: Collection[int], outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Group outcomes by the rank's state, as (text, outcomes): blamed ranks first, then small groups."""
    groups: dict[tuple[bool, str], list[Outcome]] = defaultdict(list)
    traced = any(o.collectives for o in outcomes)
    for outcome in outcomes:
        waits = bool(blamed_ranks) and outcome.rank not in blamed_ranks
        groups[outcome.rank not in blamed_ranks, _rank_state_text(outcome, traced=traced, waits=waits)].append(outcome)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1][0].rank))
    return [(text, group) for (_, text), group in ordered]


def state_evidence(blamed_ranks: Collection[int], outcomes: Sequence[Outcome]) -> dict[str, Scalar | list[Scalar]]:
    """Return the evidence `ranks`: one line for each group of ranks in the same state."""
    ordered = _groups_by_state(blamed_ranks, outcomes)
    lines: list[Scalar] = [f"{ranks_text([o.rank for o in own])}: {text}" for text, own in ordered[:_MAX_LINES]]
    if len(ordered) > _MAX_LINES:
        lines.append(f"others: {count(len(ordered) - _MAX_LINES, 'more state')}, in the recording")
    return {"ranks": lines}


def _rank_state_text(outcome: Outcome, *, traced: bool, waits: bool) -> str:
    """Describe how a rank ended, in words that are equal for all ranks in this state. `waits`: for a blamed rank."""
    word = "waited" if waits and outcome.status is Status.HUNG else outcome.status.value
    words = ["ended after another rank failed" if outcome.interrupted else _STATUS_WORDS.get(outcome.status, word)]
    if outcome.last_step:
        words.append(f"at '{outcome.last_step}'")
    text = " ".join(words)
    process = outcome.process
    if process is not None:
        inside = f" in {process.stack[0].rpartition(':')[0]})" if process.stack else ""
        text += f", {state_text(process)}{inside}"
    elif outcome.status is Status.RAISED and is_echo(outcome):
        text += ", because of another rank's failure"
    elif outcome.error:
        text += f", {outcome.error.splitlines()[0][:160]}"
    if outcome.why_no_collectives:
        return f"{text}; its collectives cannot be read: {outcome.why_no_collectives}"
    if not traced or outcome.status not in (Status.HUNG, Status.RAISED):
        return text
    end = last_collective(outcome.collectives)
    if end is not None:
        return f"{text}; last posted {collective_text(end)}"
    return f"{text}; {'posted nothing' if outcome.collectives is not None else 'its last collective is not known'}"


def _stacks(blamed_ranks: Collection[int], groups: Sequence[Sequence[Outcome]]) -> Mapping[str, list[Scalar]]:
    """Return the stacks of blamed ranks, equal stacks once, and the stack of one other rank."""
    stacks = [(o.rank, o.process.stack) for own in groups for o in own if o.process is not None and o.process.stack]
    places = {tuple(stack): rank for rank, stack in reversed(stacks) if rank in blamed_ranks}
    blamed = [(rank, stack) for rank, stack in stacks if places.get(tuple(stack)) == rank][:_MAX_STACKS]
    others = [row for row in stacks if row[0] not in blamed_ranks][-1:]
    inner = {rank: list(takewhile(lambda frame: not frame.startswith(_WORKER_FRAME), stack)) for rank, stack in stacks}
    return {f"stack_of_rank_{rank}": [*(inner[rank] or stack)] for rank, stack in (*blamed, *others)}
