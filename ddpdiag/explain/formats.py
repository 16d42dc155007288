"""What logs and error texts mean, for programs: JSON, and annotations for GitHub Actions."""

from collections.abc import Sequence

from msgspec import Struct

from ddpdiag.codec import encode
from ddpdiag.explain.card import Role
from ddpdiag.explain.tally import STANDARD_INPUT, Explanation, Sighting
from ddpdiag.render.markup import annotation
from ddpdiag.render.page import one_line

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
            sightings=tuple(map(_row, each.sightings)),
        )
        for each in found
    )
    return encode(ExplainReport(files=files, exit_code=exit_code)).decode() + "\n"


def _row(one: Sighting) -> SightingRow:
    return SightingRow(
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
