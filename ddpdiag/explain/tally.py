"""Tally the lines of each card while a log is read, make sightings of the tallies, and compare the sightings with each
other: which one explains the others, which one is a consequence, and which one comes first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.explain.card import Card, Role
from ddpdiag.explain.lines import Origin
from ddpdiag.stats import odd_ones_out

# The name of a log that is read from a pipe. No file has this name.
STANDARD_INPUT = "standard input"
_MOST_NAMES = 100_000
# Collectives in which every rank must give as many elements, and operations whose two sides have different names.
_EQUAL_SIZES = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "BARRIER"})
_TWO_SIDED = frozenset({"SEND", "RECV", "COALESCED"})


class Call(NamedTuple):
    """The collective that ranks name under a number. `elements` is None if ranks may give different numbers."""

    operation: str
    elements: int | None = None


class Sighting(Struct, frozen=True, kw_only=True):
    """A card's text in a log: how often, in which lines, and the ranks and hosts that printed it.

    `ranks`, `tasks` (of `srun -l`), `local_ranks` (of torchrun's own prefix) and `hosts` are those that the lines name.
    `missing` are ranks that others waited for. `works` are, by the number of a collective, the ranks whose last one it
    was. `calls` are the different collectives that ranks name under the number `differing`, the most common one last.
    `line` is the first line, `excerpt` its text.
    """

    card: Card
    count: int
    line: int
    last_line: int
    excerpt: str
    ranks: tuple[int, ...] = ()
    local_ranks: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    works: dict[int, tuple[int, ...]] = {}
    differing: int | None = None
    calls: tuple[tuple[Call, tuple[int, ...]], ...] = ()
    frame: str = ""


class Explanation(Struct, frozen=True, kw_only=True):
    """What explains a log (or a text, without `source`): its sightings, first cause first; how many lines it has."""

    sightings: tuple[Sighting, ...]
    lines: int
    source: str

    @property
    def is_explained(self) -> bool:
        """Whether a sighting shows more than that another process failed; an unknown warning alone does not."""
        return any(
            one.card.role not in (Role.ECHO, Role.NOTE) and not (one.card.fallback and one.card.role is Role.HINT)
            for one in self.sightings
        )

    @property
    def has_failure(self) -> bool:
        """Whether a sighting shows that a process failed or waited in vain; healthy jobs print hints and notes, too."""
        return any(one.card.role not in (Role.HINT, Role.NOTE) for one in self.sightings)


@dataclass
class Tally:
    """Counts the lines of a card while a log is read, and collects what they name."""

    card: Card
    line: int
    excerpt: str
    count: int = 0
    last_line: int = 0
    ranks: set[int] = field(default_factory=set)
    local_ranks: set[int] = field(default_factory=set)
    tasks: set[int] = field(default_factory=set)
    hosts: dict[str, None] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    works: dict[int, int] = field(default_factory=dict)
    calls: dict[tuple[str, int], dict[int, Call]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    frame: str = ""
    # Whether a line of the card followed from no other text; else `follower` is its role, by what it followed first.
    is_first: bool = False
    follower: Role = Role.NOTE

    def add(self, line: int, origin: Origin, groups: Mapping[str, str]) -> None:
        """Count one more line. A rank or host that the text itself names replaces that of the line's prefixes."""
        if not self.count:
            self.values = dict(groups)
        self.count += 1
        self.last_line = line
        rank, host = int(groups["rank"]) if "rank" in groups else origin.rank, groups.get("host", origin.host)
        if "other" in groups:
            self.ranks.add(int(groups["other"]))
        for number, known in (rank, self.ranks), (origin.local_rank, self.local_ranks), (origin.task, self.tasks):
            if number is not None and len(known) < _MOST_NAMES:
                known.add(number)
        if host is not None and len(self.hosts) < _MOST_NAMES:
            self.hosts[host] = None
        self.missing.update(map(int, re.findall(r"\d+", groups.get("missing", ""))))
        if "work" in groups and rank is not None and len(self.works) < _MOST_NAMES:
            self.works[rank] = int(groups["work"])
            operation, elements = groups.get("operation", "SEND"), groups.get("elements")
            if operation not in _TWO_SIDED:
                call = Call(operation, int(elements) if elements and operation in _EQUAL_SIZES else None)
                self.calls.setdefault((groups.get("group", ""), int(groups["work"])), {})[rank] = call

    def differing(self) -> tuple[int | None, tuple[tuple[Call, tuple[int, ...]], ...]]:
        """The first number under which ranks name different collectives, and these with their ranks; None, ()."""
        for (_, work), by_rank in sorted(self.calls.items(), key=lambda item: item[0][1]):
            if (odd := odd_ones_out(by_rank)) is not None:
                sides = {by_rank[ranks[0]]: ranks for ranks in odd.groups.values()}
                return work, tuple(sorted(sides.items(), key=lambda side: (len(side[1]), side[1])))
        return None, ()

    def sighting(self) -> Sighting:
        """The tally as a sighting. An unknown text that only followed another one does not count as a failure."""
        card = self.card.filled(self.values)
        if card.fallback and not self.is_first:
            card = structs.replace(card, role=self.follower)
        differing, calls = self.differing()
        return Sighting(
            differing=differing,
            calls=calls,
            card=card,
            frame=self.frame,
            count=self.count,
            line=self.line,
            last_line=self.last_line,
            excerpt=self.excerpt,
            ranks=tuple(sorted(self.ranks)),
            # A global rank is more exact than the local one, which torchrun's prefix adds.
            local_ranks=() if self.ranks else tuple(sorted(self.local_ranks)),
            tasks=tuple(sorted(self.tasks)),
            hosts=tuple(self.hosts),
            missing=tuple(sorted(self.missing)),
            works={
                work: tuple(sorted(rank for rank, own in self.works.items() if own == work))
                for work in sorted(set(self.works.values()))
            },
        )


# Comparison of sightings ---------------------------------------------------------------------------------------------

# A fallback that comes after a wait, or a warning, is listed after what others waited for.
_PLACES = {Role.CAUSE: 0, Role.FAILURE: 1, Role.HINT: 3, Role.WAIT: 4, Role.ECHO: 6, Role.NOTE: 7}
_AFTER_KNOWN_FAILURES, _AFTER_WAITS = 2, 5


def related(sightings: Sequence[Sighting], cards: Sequence[Card], *, is_log: bool) -> list[Sighting]:
    """The sightings with the roles that they have among all sightings of the log.

    Some only echo another one, some prove that ranks differ, and an unknown warning is the failure of a log that shows
    no other reason for one. A warning in a pasted text (no log) is the failure, because the user asks about it.
    """
    by_name = {card.name: card for card in cards}
    seen = {one.card.name for one in sightings}
    changed = []
    for one in sightings:
        card = by_name[one.card.mismatch].filled({}) if one.calls and one.card.mismatch else one.card
        if not seen.isdisjoint(card.echo_of):
            card = structs.replace(card, role=Role.ECHO)
        changed.append(structs.replace(one, card=card))
    failures = [one.card for one in changed if one.card.role not in (Role.HINT, Role.NOTE)]
    has_reason = any(
        card.role in (Role.CAUSE, Role.WAIT) or (card.role is Role.FAILURE and card.vague != "library")
        for card in failures
    )
    is_warned = not is_log or (bool(failures) and not has_reason)
    for at, one in enumerate(changed):
        if _is_warning(one.card) and is_warned:
            changed[at] = structs.replace(one, card=structs.replace(one.card, role=Role.FAILURE))
        elif one.card.is_retried and has_reason:
            changed[at] = structs.replace(one, card=structs.replace(one.card, role=Role.NOTE))
    return changed


def _is_warning(card: Card) -> bool:
    return card.fallback and card.role is Role.HINT


def in_order(sightings: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """Sort sightings by role, then by line, so that those that explain the others are first.

    A rank that others waited for is not missing if it waited itself. Waits for such ranks only are listed after waits
    for missing ranks.
    """
    waits = [one for one in sightings if one.card.role is Role.WAIT]
    waiting = {rank for one in waits for rank in (*one.ranks, one.card.waiting_rank)}
    settled = [
        structs.replace(one, missing=tuple(rank for rank in one.missing if rank not in waiting)) for one in sightings
    ]
    misled = {new.card.name for old, new in zip(sightings, settled, strict=True) if old.missing and not new.missing}
    is_known = any(one.card.role is Role.FAILURE and not one.card.vague and not one.card.fallback for one in sightings)

    def has_origin(one: Sighting) -> bool:
        return bool(one.ranks or one.local_ranks or one.tasks or one.hosts)

    def place(one: Sighting) -> tuple[int, bool, int]:
        number = _PLACES[one.card.role]
        if one.card.fallback and one.card.role in (Role.FAILURE, Role.HINT):
            # Its process may have waited before, unless it belongs to other ranks than those that waited.
            before = [wait for wait in waits if wait.line < one.line and not (has_origin(wait) and has_origin(one))]
            is_late = _is_warning(one.card) or bool(before)
            number = _AFTER_WAITS if is_late else _AFTER_KNOWN_FAILURES if is_known else number
        return number, one.card.name in misled, one.line

    return tuple(sorted(settled, key=place))
