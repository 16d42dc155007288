"""What logs and error texts mean: for people, the first cause in full, then its consequences; for programs as JSON, and
as annotations for GitHub Actions.
"""

import textwrap
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ddpdiag.codec import encode
from ddpdiag.explain.card import Role
from ddpdiag.explain.tally import STANDARD_INPUT, Call, Explanation, Sighting
from ddpdiag.render.markup import annotation
from ddpdiag.render.page import LEAST_WIDTH, one_line
from ddpdiag.text import count, fold_hosts, fold_ranks, listed

_COLORS = {Role.CAUSE: "31", Role.FAILURE: "31", Role.HINT: "33", Role.WAIT: "33", Role.ECHO: "2", Role.NOTE: "2"}
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


def render(found: Explanation, *, width: int, color: bool) -> str:
    """Each sighting, the explaining one first; echoes and notes in brief. `found.source` is empty for a mere text."""
    width = max(width, LEAST_WIDTH)
    lines: list[str] = []
    if found.source:
        known = sum(not one.card.fallback for one in found.sightings)
        others = len(found.sightings) - known
        parts = [count(found.lines, "line"), count(known, "known text"), *([f"{others} unknown"] if others else [])]
        lines += textwrap.wrap(f"ddpdiag: {one_line(found.source)}: {', '.join(parts)}", width)
    for number, sighting in enumerate(found.sightings):
        brief = sighting.card.role in (Role.ECHO, Role.NOTE) if number else False
        lines += _sighting(sighting, width, color=color, brief=brief or number >= _SHOWN_FULL, log=bool(found.source))
    if said := _end(found):
        lines += ["", *textwrap.wrap(said, width, break_on_hyphens=False)]
    return "\n".join(lines).lstrip("\n") + "\n"


def without_sightings(logs: Sequence[Explanation], *, width: int, others: int) -> str:
    """One line for the logs of a folder that have no known text; where no other log has one, what to do."""
    names = listed([one_line(log.source) for log in logs], _SHOWN_NAMES)
    said = [f"ddpdiag: no known text in {count(len(logs), 'other file' if others else 'file')}: {names}"]
    paragraphs = said if others else [*said, "", _UNKNOWN]
    wrapped = (textwrap.wrap(each, max(width, LEAST_WIDTH), break_on_hyphens=False) or [""] for each in paragraphs)
    return "\n".join(line for lines in wrapped for line in lines) + "\n"


def _sighting(sighting: Sighting, width: int, *, color: bool, brief: bool, log: bool) -> Iterator[str]:
    card = sighting.card
    role = f"\x1b[{_COLORS[card.role]}m{card.role.value:<7}\x1b[0m" if color else f"{card.role.value:<7}"
    yield ""
    times = f"{sighting.count:,} times, lines {sighting.line:,} to {sighting.last_line:,}"
    where = "; ".join(filter(None, (_who(sighting), f"line {sighting.line:,}" if sighting.count == 1 else times)))
    name = f"{card.name} ({where})" if log else card.name
    first, *rest = textwrap.wrap(name, width - 8, break_on_hyphens=False)
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
        # The last collective of each rank: ranks that are behind took another path in the code, or hang before it.
        first_work, *later = sighting.works.items()
        told = [f"number {work} on {_ranks(ranks)}" for work, ranks in (first_work, *later[-_SHOWN_FULL:])]
        least = first_work[1]
        behind = f"{_ranks(least).capitalize()} lag{'s' if len(least) == 1 else ''} behind."
        yield from _filled("Collectives: ", f"{'; '.join(told)}. {behind}", width)
    yield from _filled("Confirm: ", card.confirm, width)
    yield from _filled("Do: ", card.fix, width)
    yield f"    Page: ddpdiag explain {card.code}"


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
            f"Start with {_place(first)}: it only waited, so look at {awaited}. `ddpdiag watch` shows the rank and its "
            "line when the job hangs again; `ddpdiag check` tests the hosts and the network."
        )
    return f"Start with {_place(first)}; `ddpdiag explain {first.card.code}` is its page."


def _place(first: Sighting) -> str:
    who = _who(first)
    return f"{first.card.name} in line {first.line:,}{f' ({who})' if who else ''}"


# For programs ---------------------------------------------------------------------------------------------------------

EXPLAIN_SCHEMA = "ddpdiag.explain/1"
# Notes are printed in healthy jobs, too.
_LEVELS = {
    Role.CAUSE: "error",
    Role.FAILURE: "error",
    Role.HINT: "warning",
    Role.WAIT: "warning",
    Role.ECHO: "notice",
}


class SightingRow(Struct, frozen=True, kw_only=True):
    """A text that was found: the fields of a sighting, and those of its card. `line` counts from 1."""

    role: Role
    card: str
    is_known: bool
    code: str
    count: int
    line: int
    last_line: int
    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    tasks: tuple[int, ...]
    hosts: tuple[str, ...]
    missing: tuple[int, ...]
    quote: str
    raised_in: str
    meaning: str
    confirm: str
    fix: str


class FileRow(Struct, frozen=True, kw_only=True):
    """A log and its sightings, the one that explains the others first; the path is empty for an error text."""

    path: str
    lines: int
    is_explained: bool
    sightings: tuple[SightingRow, ...]


class ExplainReport(Struct, frozen=True, kw_only=True):
    """What a run of `ddpdiag explain` found."""

    files: tuple[FileRow, ...]
    exit_code: int
    schema: str = EXPLAIN_SCHEMA


def as_json(found: Sequence[Explanation], exit_code: int) -> str:
    """`ddpdiag.explain/1` on one line."""
    files = tuple(
        FileRow(
            path=each.source,
            lines=each.lines,
            is_explained=each.is_explained,
            sightings=tuple(
                SightingRow(
                    role=one.card.role,
                    card=one.card.name,
                    is_known=not one.card.fallback,
                    code=one.card.code,
                    count=one.count,
                    line=one.line,
                    last_line=one.last_line,
                    ranks=one.ranks,
                    local_ranks=one.local_ranks,
                    tasks=one.tasks,
                    hosts=one.hosts,
                    missing=one.missing,
                    quote=one.excerpt,
                    raised_in=one.frame,
                    meaning=one.card.meaning,
                    confirm=one.card.confirm,
                    fix=one.card.fix,
                )
                for one in each.sightings
            ),
        )
        for each in found
    )
    return encode(ExplainReport(files=files, exit_code=exit_code)).decode() + "\n"


def as_github(found: Sequence[Explanation]) -> str:
    """An annotation at the first line of each text, but for notes of healthy jobs; the explaining one comes first."""
    return "".join(
        annotation(
            _LEVELS[one.card.role],
            f"{one_line(one.excerpt)}\n{one.card.meaning} {one.card.fix}",
            title=f"{one.card.role.value}: {one.card.name}",
            path="" if each.source == STANDARD_INPUT else each.source,
            line=one.line,
        )
        for each in found
        for one in each.sightings
        if one.card.role in _LEVELS
    )
