"""Explanations of logs and error texts: the first cause in full, then its consequences."""

from collections.abc import Iterator, Sequence

from ddpdiag.explain.card import Role
from ddpdiag.explain.tally import Call, Explanation, Sighting
from ddpdiag.render.blocks import Block, Items, Mark, Text
from ddpdiag.render.page import Page, one_line
from ddpdiag.render.painter import paint
from ddpdiag.text import count, fold_hosts, fold_ranks, listed, ranks_text

_MARKS = {
    Role.CAUSE: Mark.ERROR,
    Role.FAILURE: Mark.ERROR,
    Role.HINT: Mark.WARNING,
    Role.WAIT: Mark.WARNING,
    Role.ECHO: Mark.DIM,
    Role.NOTE: Mark.DIM,
}
_SHOWN_NAMES = 8
# Beyond these, readers turn to the log itself.
_SHOWN_FULL = 3

_UNKNOWN = (
    "No known error found. The job may still have failed: look for the first error of the rank that ended first "
    "(torchrun --log-dir DIR --redirects 3 keeps each rank's output; NCCL_DEBUG=WARN and TORCH_DISTRIBUTED_DEBUG=INFO "
    "make it more detailed). Test the allocation itself with `ddpdiag check`, and run a job that hangs under "
    "`ddpdiag watch`."
)
_ECHOES = (
    "These lines only show that another process failed. The first failure is not in this text, or it is not a known "
    "error. Look at the output of the ranks and hosts that are not named here, at the kernel's log (dmesg -T) and at "
    "sacct -j JOB -o JobID,State,ExitCode."
)
_HEALTHY = (
    "No failure found in this {}. Healthy jobs print such lines, too. If the job failed, look at the output of its "
    "other ranks and hosts, and test the allocation itself with `ddpdiag check`."
)
_HINTS = (
    "No failure found in this {}. Healthy jobs print such lines, too; if the job hangs or failed, start with {}. Look "
    "also at the output of its other ranks and hosts, and test the allocation itself with `ddpdiag check`."
)


def render(found: Sequence[Explanation], *, width: int, color: bool) -> str:
    """The explanations of logs as text. If there are several, those without a known text are listed at the end."""
    silent = [log for log in found if len(found) > 1 and not log.sightings]
    page = Page(color=color, width=width)
    for log in found:
        if log not in silent:
            paint(page, blocks(log))
    if silent:
        paint(page, _without_sightings(silent, others=len(found) - len(silent)))
    return page.text().rstrip("\n") + "\n"


def blocks(found: Explanation) -> Iterator[Block]:
    """The blocks of an explanation: its sightings, the first cause first; echoes and notes only in brief."""
    if found.source:
        known = sum(not one.card.fallback for one in found.sightings)
        others = len(found.sightings) - known
        parts = [count(found.lines, "line"), count(known, "known text"), *([f"{others} unknown"] if others else [])]
        yield Text(f"ddpdiag: {one_line(found.source)}: {', '.join(parts)}")
    for number, one in enumerate(found.sightings):
        is_brief = number >= _SHOWN_FULL or (number > 0 and one.card.role in (Role.ECHO, Role.NOTE))
        times = f"{one.count:,} times, lines {one.line:,} to {one.last_line:,}"
        where = "; ".join(filter(None, (_origins(one), f"line {one.line:,}" if one.count == 1 else times)))
        name = f"{one.card.name} ({where})" if found.source else one.card.name
        yield Text(name, one.card.role.value, _MARKS[one.card.role])
        yield Items((one.card.meaning,) if is_brief else tuple(_details(one, is_log=bool(found.source))))
    if sentence := _end(found):
        yield Text(sentence)


def _without_sightings(logs: Sequence[Explanation], *, others: int) -> Iterator[Block]:
    """Name the logs that have no known text. If there are no `others` that have one, also say what to do."""
    names = listed([one_line(log.source) for log in logs], _SHOWN_NAMES)
    yield Text(f"ddpdiag: no known text in {count(len(logs), 'other file' if others else 'file')}: {names}")
    if not others:
        yield Text(_UNKNOWN)


def _details(sighting: Sighting, *, is_log: bool) -> Iterator[str]:
    card = sighting.card
    if is_log:
        yield f'"{one_line(sighting.excerpt)}"'
    if sighting.frame:
        yield f"Raised in: {one_line(sighting.frame)}"
    yield card.meaning
    if sighting.missing:
        yield f"Waited for: {_ranks(sighting.missing)}."
    if sighting.calls:
        yield f"Collectives: {_calls(sighting)}"
    elif len(sighting.works) > 1:
        # The last collective of each rank: ranks that are behind took another path in the code, or hang before it.
        first_work, *later = sighting.works.items()
        lasts = [f"number {work} on {_ranks(ranks)}" for work, ranks in (first_work, *later[-_SHOWN_FULL:])]
        least = first_work[1]
        behind = f"{_ranks(least).capitalize()} lag{'s' if len(least) == 1 else ''} behind."
        yield f"Collectives: {'; '.join(lasts)}. {behind}"
    yield f"Confirm: {card.confirm}"
    yield f"Do: {card.fix}"
    yield f"Page: ddpdiag explain {card.code}"


def _call(call: Call) -> str:
    return call.operation if call.elements is None else f"{call.operation} of {count(call.elements, 'element')}"


def _calls(sighting: Sighting) -> str:
    """The different collectives that ranks name under one number, and the ranks that differ from most."""
    *odd, (_, most) = sighting.calls
    sides = [f"{_call(call)} on {_ranks(ranks)}" for call, ranks in sighting.calls[-_SHOWN_FULL:]]
    rest = tuple(sorted(rank for _, ranks in odd for rank in ranks))
    verb = "differs" if len(rest) == 1 else "differ"
    odd_ranks = f" {_ranks(rest).capitalize()} {verb} from most." if len(most) > len(rest) else ""
    return f"number {sighting.differing} is {'; '.join(sides)}.{odd_ranks}"


def _origins(sighting: Sighting) -> str:
    """The ranks and hosts that printed a text: "ranks 0,2; host n1". Empty if none is known."""
    parts = [_ranks(sighting.ranks)] if sighting.ranks else []
    if sighting.local_ranks:
        parts.append(f"local {_ranks(sighting.local_ranks)}")
    if sighting.tasks:
        tasks = fold_ranks(sighting.tasks, limit=_SHOWN_NAMES)
        parts.append(f"{'task' if len(sighting.tasks) == 1 else 'tasks'} {tasks}")
    if sighting.hosts:
        hosts = one_line(fold_hosts(sighting.hosts, limit=_SHOWN_NAMES))
        parts.append(f"{'host' if len(sighting.hosts) == 1 else 'hosts'} {hosts}")
    return "; ".join(parts)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranks_text(ranks, limit=_SHOWN_NAMES)


def _end(found: Explanation) -> str:
    if not found.sightings:
        return _UNKNOWN
    first = found.sightings[0]
    kind = "log" if found.source else "text"
    if all(one.card.role is Role.NOTE for one in found.sightings):
        return _HEALTHY.format(kind)
    if found.source and not found.has_failure:
        return _HINTS.format(kind, _place(first))
    if not found.is_explained:
        return _ECHOES
    if not found.source:
        return ""
    if first.card.fallback:
        return f"No known text explains this log. Start with its first unknown failure: {_place(first)}."
    if first.card.role is Role.WAIT:
        awaited = _ranks(first.missing) if first.missing else "the rank for which it waited"
        return (
            f"Start with {_place(first)}: it only waited, so look at {awaited}. `ddpdiag watch` shows the rank and its "
            "line when the job hangs again; `ddpdiag check` tests the hosts and the network."
        )
    return f"Start with {_place(first)}; `ddpdiag explain {first.card.code}` is its page."


def _place(first: Sighting) -> str:
    origins = _origins(first)
    return f"{first.card.name} in line {first.line:,}{f' ({origins})' if origins else ''}"
