"""What a log or an error text means, for people: the first cause in full, then its consequences."""

import textwrap
from collections.abc import Iterator

from ddpdiag.explain.card import Role
from ddpdiag.explain.matcher import Call, Explanation, Sighting
from ddpdiag.render.page import LEAST_WIDTH, one_line
from ddpdiag.text import count, fold_hosts, fold_ranks

_COLORS = {Role.CAUSE: "31", Role.FAILURE: "31", Role.HINT: "33", Role.WAIT: "33", Role.ECHO: "2", Role.NOTE: "2"}
_SHOWN_NAMES = 8
# Beyond these, readers turn to the log itself.
_SHOWN_FULL = 3

_UNKNOWN = (
    "No known error found. The job may still have failed: look for the first error of the rank that ended first "
    "(torchrun --log-dir DIR --redirects 3 keeps each rank's output; NCCL_DEBUG=WARN and TORCH_DISTRIBUTED_DEBUG=INFO "
    "make it more detailed), and test the allocation itself with `ddpdiag check`."
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


def render(found: Explanation, *, width: int, color: bool) -> str:
    """Each sighting, the explaining one first; echoes and notes in brief. `found.source` is empty for a mere text."""
    width = max(width, LEAST_WIDTH)
    lines = [*_head(found, width)]
    for number, sighting in enumerate(found.sightings):
        brief = sighting.card.role in (Role.ECHO, Role.NOTE) if number else False
        lines += _sighting(sighting, width, color=color, brief=brief or number >= _SHOWN_FULL, log=bool(found.source))
    if said := _end(found):
        lines += ["", *textwrap.wrap(said, width, break_on_hyphens=False)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _head(found: Explanation, width: int) -> Iterator[str]:
    if found.source:
        known = sum(not one.card.fallback for one in found.sightings)
        parts = [count(found.lines, "line"), count(known, "known text")]
        if others := len(found.sightings) - known:
            parts.append(f"{others} unknown")
        yield from textwrap.wrap(f"ddpdiag: {one_line(found.source)}: {', '.join(parts)}", width)


def _sighting(sighting: Sighting, width: int, *, color: bool, brief: bool, log: bool) -> Iterator[str]:
    card = sighting.card
    role = f"\x1b[{_COLORS[card.role]}m{card.role.value:<7}\x1b[0m" if color else f"{card.role.value:<7}"
    yield ""
    where = f" ({_where(sighting)})" if log else ""
    first, *rest = textwrap.wrap(f"{card.name}{where}", width - 8, break_on_hyphens=False)
    yield f"{role} {first}"
    yield from (f"        {line}" for line in rest)
    if brief:
        yield from _filled("", card.meaning, width)
        return
    if log:
        yield from _filled("> ", one_line(sighting.excerpt), width)
    if sighting.frame:
        yield from _filled("Raised in: ", one_line(sighting.frame), width)
    yield from _filled("", card.meaning, width)
    if sighting.missing:
        yield from _filled("Waited for: ", f"{_ranks(sighting.missing)}.", width)
    if sighting.calls:
        yield from _filled("Collectives: ", _calls(sighting), width)
    elif len(sighting.works) > 1:
        yield from _filled("Collectives: ", _works(sighting), width)
    yield from _filled("Confirm: ", card.confirm, width)
    yield from _filled("Do: ", card.fix, width)
    yield f"    Page: ddpdiag explain {card.code}"


def _works(sighting: Sighting) -> str:
    """The last collective of each rank: ranks that are behind took another path in the code, or hang before it."""
    least, *others = sighting.works.items()
    told = [f"number {work} on {_ranks(ranks)}" for work, ranks in (least, *others[-_SHOWN_FULL:])]
    return f"{'; '.join(told)}. {_ranks(least[1]).capitalize()} lag{'s' if len(least[1]) == 1 else ''} behind."


def _call(call: Call) -> str:
    return call.operation if call.elements is None else f"{call.operation} of {count(call.elements, 'element')}"


def _calls(sighting: Sighting) -> str:
    """The collective that each side names under the number; a rank that differs from most is named."""
    *odd, (_, most) = sighting.calls
    told = [f"{_call(call)} on {_ranks(ranks)}" for call, ranks in sighting.calls[-_SHOWN_FULL:]]
    rest = tuple(sorted(rank for _, ranks in odd for rank in ranks))
    verb = "differs" if len(rest) == 1 else "differ"
    who = f" {_ranks(rest).capitalize()} {verb} from most." if len(most) > len(rest) else ""
    return f"number {sighting.differing} is {'; '.join(told)}.{who}"


def _filled(lead: str, text: str, width: int) -> list[str]:
    indent = "    "
    return textwrap.wrap(
        f"{lead}{text}",
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _where(sighting: Sighting) -> str:
    parts = [who] if (who := _who(sighting)) else []
    parts.append(
        f"line {sighting.line:,}"
        if sighting.count == 1
        else f"{sighting.count:,} times, lines {sighting.line:,} to {sighting.last_line:,}"
    )
    return "; ".join(parts)


def _who(sighting: Sighting) -> str:
    """The ranks and hosts that printed it: "ranks 0, 2; host n1", or nothing."""
    parts = [_ranks(sighting.ranks)] if sighting.ranks else []
    if sighting.local_ranks:
        parts.append(f"local {_ranks(sighting.local_ranks)}")
    if sighting.tasks:
        tasks = fold_ranks(sighting.tasks, limit=_SHOWN_NAMES)
        parts.append(f"{_plural(len(sighting.tasks), 'task')} {tasks}")
    if sighting.hosts:
        hosts = one_line(fold_hosts(sighting.hosts, limit=_SHOWN_NAMES))
        parts.append(f"{_plural(len(sighting.hosts), 'host')} {hosts}")
    return "; ".join(parts)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{_plural(len(ranks), 'rank')} {fold_ranks(ranks, limit=_SHOWN_NAMES)}"


def _plural(number: int, word: str) -> str:
    return word if number == 1 else f"{word}s"


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
            f"Start with {_place(first)}: it only waited, so look at {awaited}; `ddpdiag check` finds the rank and the "
            "reason."
        )
    return f"Start with {_place(first)}; `ddpdiag explain {first.card.code}` is its page."


def _place(first: Sighting) -> str:
    who = _who(first)
    return f"{first.card.name} in line {first.line:,}{f' ({who})' if who else ''}"
