"""The evidence of a failed trial in words: the state of each rank, and the ranks for which the others wait."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from ddpdiag.checks.blame import Blame, is_echo
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.posted import in_words, last
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
# Limits of evidence that people can read: lines (one for all ranks in a state), stacks, characters of output.
_MOST_LINES = 64
_MOST_STACKS = 4
_MOST_OUTPUT = 600
# C++ and Python begin a crash report with these words, before they list frames and modules.
_TELLING = ("what():", "Fatal Python error")
# torch prints these in healthy runs, too: gloo since torch 2.8, and any torch without NumPy (a warning and its source).
_CHATTER = ("[Gloo] Rank ", "UserWarning: Failed to initialize NumPy", "_conversion_method_template(device=")
# The frames outside of this one belong to ddpdiag's worker and are always the same.
_OUTERMOST = "_measure (worker.py:"


def state_text(process: ProcessState) -> str:
    """The state of a process in words, such as "sleeping"."""
    return _STATES.get(process.state or "", f"in state {process.state}" if process.state else "in an unknown state")


def last_words(output: str) -> str:
    """The line of an output that shows why the process ended: its crash message, else the last line."""
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip("^~ ") and not any(words in line for words in _CHATTER)
    ]
    message = next((line for line in lines if line.startswith(_TELLING)), lines[-1] if lines else "")
    return message[:_MOST_OUTPUT]


def waits_text(blame: Blame, outcomes: Sequence[Outcome]) -> str:
    """A sentence: the collective in which ranks wait, and the last one of the blamed ranks. Empty if not known."""
    if blame.sides:
        parts = [f"{ranks_text(ranks)} posted {in_words(collective)}" for collective, ranks in blame.sides[:4]]
        return f"{begun('; '.join(parts))}." if not blame.ranks else ""
    others = [o for o in outcomes if o.rank not in blame.ranks and o.status in (Status.HUNG, Status.RAISED)]
    ends = {o.rank: end for o in others if (end := last(o.collectives)) is not None}
    if not ends:
        return ""
    awaited, _ = max(Counter(ends.values()).items(), key=lambda item: (item[1], item[0].seq))
    waiting = tuple(rank for rank, end in ends.items() if end == awaited)
    verb = ("waits" if len(waiting) == 1 else "wait") if any(o.status is Status.HUNG for o in others) else "waited"
    if not blame.ranks:
        return f"{begun(ranks_text(waiting))} {verb} in {in_words(awaited)}."
    whom, whose, who = ("it", "its", "it has") if len(blame.ranks) == 1 else ("them", "their", "they have")
    own = [last(o.collectives) for o in outcomes if o.rank in blame.ranks and o.collectives is not None]
    furthest = max((end for end in own if end is not None), key=lambda end: end.seq, default=None)
    if not own:
        far = ""
    elif furthest is None:
        far = f"; {who} posted no collective"
    else:
        far = f"; {whose} last one was {in_words(furthest)}"
    return f"{begun(ranks_text(waiting))} {verb} for {whom} in {in_words(awaited)}{far}."


def bundle(guilty: Collection[int], outcomes: Sequence[Outcome]) -> dict[str, Scalar | list[Scalar]]:
    """The evidence of a failure: the state of each rank, and the stacks of blamed ranks and of a waiting rank."""
    return {
        **standings(guilty, outcomes),
        **_stacks(guilty, [own for _, own in _alike(guilty, outcomes)]),
    }


def _alike(guilty: Collection[int], outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Each state in words, with the outcomes of the ranks in it: blamed ranks first, then small groups first."""
    groups: dict[tuple[bool, str], list[Outcome]] = defaultdict(list)
    traced = any(o.collectives for o in outcomes)
    for outcome in outcomes:
        waits = bool(guilty) and outcome.rank not in guilty
        groups[outcome.rank not in guilty, _rank_state(outcome, traced=traced, waits=waits)].append(outcome)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1][0].rank))
    return [(text, own) for (_, text), own in ordered]


def standings(guilty: Collection[int], outcomes: Sequence[Outcome]) -> dict[str, Scalar | list[Scalar]]:
    """The evidence `ranks`: one line for each group of ranks in the same state."""
    ordered = _alike(guilty, outcomes)
    lines: list[Scalar] = [f"{ranks_text([o.rank for o in own])}: {text}" for text, own in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"others: {count(len(ordered) - _MOST_LINES, 'more state')}, in the recording")
    return {"ranks": lines}


def _rank_state(outcome: Outcome, *, traced: bool, waits: bool) -> str:
    """How one rank ended, in words that are the same for all ranks in this state. `waits`: for a blamed rank."""
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
    end = last(outcome.collectives)
    if end is not None:
        return f"{text}; last posted {in_words(end)}"
    return f"{text}; {'posted nothing' if outcome.collectives is not None else 'its last collective is not known'}"


def _stacks(guilty: Collection[int], groups: Sequence[Sequence[Outcome]]) -> Mapping[str, list[Scalar]]:
    """The stacks of blamed ranks, one for each place in the code, and the stack of one waiting rank."""
    stacks = [(o.rank, o.process.stack) for own in groups for o in own if o.process is not None and o.process.stack]
    places = {tuple(stack): rank for rank, stack in reversed(stacks) if rank in guilty}
    blamed = [(rank, stack) for rank, stack in stacks if places.get(tuple(stack)) == rank][:_MOST_STACKS]
    others = [row for row in stacks if row[0] not in guilty][-1:]
    inner = {rank: list(takewhile(lambda frame: not frame.startswith(_OUTERMOST), stack)) for rank, stack in stacks}
    return {f"stack_of_rank_{rank}": [*(inner[rank] or stack)] for rank, stack in (*blamed, *others)}
