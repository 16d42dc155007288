"""Count the lines of each card in a log, summarize them as a `Sighting`, and order the sightings, causes first."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.explain.card import Card, Role
from ddpdiag.explain.lines import LIBRARY_FILE, UNKNOWN_ORIGIN, Origin
from ddpdiag.explain.log_files import origins_of_paths
from ddpdiag.stats import find_odd_ranks

# The name of a log that is read from standard input.
STANDARD_INPUT = "standard input"
_MAX_NAMES = 100_000
# Collectives to which every rank must give the same number of elements, and operations that differ between two ranks.
_EQUAL_SIZES = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "BARRIER"})
_POINT_TO_POINT = frozenset({"SEND", "RECV", "COALESCED"})
# A rank that prints these was told that another one timed out, and may be the one for which that one waited.
_SIGNALS_OF_OTHERS = frozenset({"dump-signal", "dump-observed"})
# If more lines follow, a job went on after its ranks had joined.
_MAX_LINES_AFTER_JOINING = 3
# torch prints NCCL's last error this many lines after its own.
_MAX_LINES_TO_DETAIL = 4


class Call(NamedTuple):
    """A collective in a log. `elements` is None if they are unknown, or if ranks may give different numbers of them."""

    operation: str
    elements: int | None = None


class FirstLine(NamedTuple):
    """The first line of a card in a log, with its text (`excerpt`), its origin and the log's place in the job.

    `time` is in seconds, and None if no line near it has a time. `values` are the groups of the card's pattern.
    """

    log_number: int
    log: str
    line: int
    excerpt: str
    time: float | None = None
    origin: Origin = UNKNOWN_ORIGIN
    values: Mapping[str, str] = {}

    def is_before(self, other: "FirstLine") -> bool:
        """Whether this line was printed first: by time, or else by the order of the logs."""
        if self.time is not None and other.time is not None:
            return self.time < other.time
        return self.log_number < other.log_number


class Sighting(Struct, frozen=True, kw_only=True):
    """All lines of a job's logs with the text of one card.

    `count` is the number of these lines, and `first` the first of them. `last_line` is the number of the last one, in
    the last log. `lines_by_log` maps the name of each log with such a line to the first line there. `ranks`,
    `local_ranks` (in torchrun's prefix), `tasks` (of `srun -l`) and `hosts` are named in the lines. `missing_ranks` are
    ranks that others waited for. `ranks_by_work` maps the number of a collective to the ranks whose last collective it
    was. `differing_calls` are the different collectives that ranks name under the number `differing_work`, the most
    common one last, each with its ranks. `frame` is the place in the user's code that first raised an exception, and
    `frame_by_rank` that of each rank.
    """

    card: Card
    count: int
    first: FirstLine
    last_line: int
    lines_by_log: dict[str, int] = {}
    ranks: tuple[int, ...] = ()
    local_ranks: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    ranks_by_work: dict[int, tuple[int, ...]] = {}
    differing_work: int | None = None
    differing_calls: tuple[tuple[Call, tuple[int, ...]], ...] = ()
    world: int = 0
    frame: str = ""
    frame_by_rank: dict[int, str] = {}

    @property
    def odd_callers(self) -> tuple[int, ...]:
        """The ranks that called other collectives than most ranks."""
        if not self.differing_calls:
            return ()
        *minority, (_, majority) = self.differing_calls
        odd = tuple(sorted(rank for _, ranks in minority for rank in ranks))
        return odd if len(majority) > len(odd) else ()

    @property
    def ranks_behind(self) -> tuple[int, ...]:
        """The ranks whose last collective has the lowest number, unless they are more than the other ranks."""
        behind, *others = self.ranks_by_work.values() or [()]
        return behind if len(behind) <= sum(map(len, others)) else ()


class Explanation(Struct, frozen=True, kw_only=True):
    """The sightings in the logs of a job, the first cause first.

    `line_counts` maps the name of each log to its number of lines. A pasted text has an empty name.
    """

    sightings: tuple[Sighting, ...]
    line_counts: dict[str, int]

    @property
    def is_pasted(self) -> bool:
        """Whether the text is a pasted one, so that its line numbers mean nothing."""
        return "" in self.line_counts

    @property
    def is_explained(self) -> bool:
        """Whether any sighting explains the log: echoes, notes and unknown warnings alone do not."""
        cards = [sighting.card for sighting in self.sightings]
        return any(card.role not in (Role.ECHO, Role.NOTE) and not _is_warning(card) for card in cards)

    @property
    def has_failure(self) -> bool:
        """Whether any sighting shows a failure or a wait. Healthy jobs print hints and notes, too."""
        return any(sighting.card.role not in (Role.HINT, Role.NOTE) for sighting in self.sightings)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The ranks that print no failure and no wait, unless they are more than the other ranks.

        torchrun's table and the names of logs show that a rank exists. So does a higher rank, if there is only one log.
        """
        failures = [one for one in self.sightings if one.card.role not in (Role.HINT, Role.NOTE)]
        own = [one for one in failures if not one.card.in_table and one.card.name not in _SIGNALS_OF_OTHERS]
        heard = {rank for one in own for rank in one.ranks}
        known = {origin.rank for origin in origins_of_paths([*self.line_counts]).values() if origin.rank is not None}
        known |= {rank for one in self.sightings for rank in one.ranks}
        if len(self.line_counts) == 1 and known:
            known |= {*range(min(known), max(known))}
        return tuple(sorted(known - heard)) if len(known - heard) < len(heard) else ()

    @property
    def waiting_places(self) -> dict[int, str]:
        """The place in the user's code at which each rank waited, or lost a rank for which it waited."""
        waits = [one for one in self.sightings if one.card.role in (Role.WAIT, Role.ECHO)]
        return {rank: frame for one in reversed(waits) for rank, frame in one.frame_by_rank.items()}


@dataclass
class Tally:
    """Counts the lines of one card and kind while logs are read. `work_by_rank` maps a process group and a rank to the
    number of its last collective. `calls_by_work` maps a process group and number to the collective that each rank
    called."""

    card: Card
    first: FirstLine
    count: int = 0
    last_line: int = 0
    lines_by_log: dict[str, int] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    local_ranks: set[int] = field(default_factory=set)
    tasks: set[int] = field(default_factory=set)
    hosts: dict[str, None] = field(default_factory=dict)
    missing_ranks: set[int] = field(default_factory=set)
    world: int = 0
    work_by_rank: dict[tuple[str, int], int] = field(default_factory=dict)
    calls_by_work: dict[tuple[str, int], dict[int, Call]] = field(default_factory=dict)
    frame: str = ""
    frame_by_rank: dict[int, str] = field(default_factory=dict)
    # Of an unknown text: how many lines follow from no other text. If each follows from one, `follower_role` counts.
    independent_count: int = 0
    follower_role: Role = Role.NOTE

    def begin_log(self, first: FirstLine) -> None:
        """Record the first line in a log. It replaces the first line of earlier logs if it was printed before it."""
        self.lines_by_log[first.log] = first.line
        if first.is_before(self.first):
            self.first, self.frame = first, ""

    def add(self, line: int, origin: Origin, groups: Mapping[str, str], frame: str = "") -> None:
        """Count one more line. A rank or host in the `groups` of the match is preferred to that of the `origin`."""
        self.count += 1
        self.last_line = line
        rank, host = int(groups["rank"]) if "rank" in groups else origin.rank, groups.get("host", origin.host)
        if "other" in groups:
            self.ranks.add(int(groups["other"]))
        for number, names in (rank, self.ranks), (origin.local_rank, self.local_ranks), (origin.task, self.tasks):
            if number is not None and len(names) < _MAX_NAMES:
                names.add(number)
        # A frame in a library does not show at which line of the script a rank was.
        if rank is not None and frame and not LIBRARY_FILE.search(frame) and len(self.frame_by_rank) < _MAX_NAMES:
            self.frame_by_rank.setdefault(rank, frame)
        if host is not None and len(self.hosts) < _MAX_NAMES:
            self.hosts[host] = None
        self.missing_ranks.update(map(int, re.findall(r"\d+", groups.get("missing", ""))))
        self.world = int(groups.get("world", self.world))
        if "work" in groups and rank is not None and len(self.work_by_rank) < _MAX_NAMES:
            self.work_by_rank[groups.get("group", ""), rank] = int(groups["work"])
            operation, elements = groups.get("operation", "SEND"), groups.get("elements")
            if operation not in _POINT_TO_POINT:
                call = Call(operation, int(elements) if elements and operation in _EQUAL_SIZES else None)
                self.calls_by_work.setdefault((groups.get("group", ""), int(groups["work"])), {})[rank] = call

    def first_difference(self) -> tuple[int | None, tuple[tuple[Call, tuple[int, ...]], ...]]:
        """The first number under which ranks name different collectives, and the ranks of each. (None, ()) if none."""
        for (_, work), calls in sorted(self.calls_by_work.items(), key=lambda item: item[0][1]):
            if any(call.elements is None for call in calls.values()):
                calls = {rank: call._replace(elements=None) for rank, call in calls.items()}
            if (odd_ranks := find_odd_ranks(calls)) is not None:
                ranks_by_call = {calls[ranks[0]]: ranks for ranks in odd_ranks.by_value.values()}
                return work, tuple(sorted(ranks_by_call.items(), key=lambda side: (len(side[1]), side[1])))
        return None, ()

    def ranks_by_work(self) -> dict[int, tuple[int, ...]]:
        """The numbers of last collectives, and the ranks of each, in the group with most ranks."""
        if not self.work_by_rank:
            return {}
        group = Counter(group for group, _ in self.work_by_rank).most_common(1)[0][0]
        works = {rank: work for (name, rank), work in self.work_by_rank.items() if name == group}
        # Numbers of several groups differ by more than the one collective by which ranks of a group can be apart.
        if not group and "(?P<group>" in self.card.pattern and max(works.values()) - min(works.values()) > 1:
            return {}
        ranks_by_work: dict[int, list[int]] = {}
        for rank in sorted(works):
            ranks_by_work.setdefault(works[rank], []).append(rank)
        return {work: tuple(ranks) for work, ranks in sorted(ranks_by_work.items())}

    def sighting(self) -> Sighting:
        """Make a sighting. An unknown text of which all lines followed from other texts does not count as a failure."""
        card = self.card.with_values(self.first.values)
        if card.is_fallback and not self.independent_count:
            card = structs.replace(card, role=self.follower_role)
        work_number, calls = self.first_difference()
        return Sighting(
            differing_work=work_number,
            differing_calls=calls,
            card=card,
            frame=self.frame,
            frame_by_rank=self.frame_by_rank,
            count=self.count,
            first=self.first,
            last_line=self.last_line,
            lines_by_log=self.lines_by_log,
            ranks=tuple(sorted(self.ranks)),
            # A global rank identifies a process better than the local rank in torchrun's prefix.
            local_ranks=() if self.ranks else tuple(sorted(self.local_ranks)),
            tasks=tuple(sorted(self.tasks)),
            hosts=tuple(self.hosts),
            missing_ranks=tuple(sorted(self.missing_ranks)),
            world=self.world,
            ranks_by_work=self.ranks_by_work(),
        )


# Sightings are listed in the order of these places. An unknown text that was printed after a wait is listed after it.
# So is a failure that shows only the library, if one of the next lines shows more.
_PLACE_OF_ROLE = {Role.CAUSE: 0, Role.FAILURE: 1, Role.HINT: 3, Role.WAIT: 4, Role.ECHO: 6, Role.NOTE: 7}
_PLACE_AFTER_FAILURES, _PLACE_AFTER_WAITS = 2, 5


def with_final_roles(
    sightings: Sequence[Sighting], cards: Sequence[Card], line_counts: Mapping[str, int]
) -> list[Sighting]:
    """The sightings with their final roles, which depend on the other sightings of the log.

    A text may be only an echo of another one, or prove that ranks called different collectives. An unknown warning
    counts as the failure if the log has a failure without any other reason, or if it is in a pasted text (no log).
    """
    by_name = {card.name: card for card in cards}
    if "" in line_counts or any(not one.card.is_last_resort and one.card.role is not Role.NOTE for one in sightings):
        sightings = [sighting for sighting in sightings if not sighting.card.is_last_resort]
    names_in_log = {sighting.card.name for sighting in sightings}
    changed = []
    for sighting in sightings:
        card = sighting.card
        if sighting.differing_calls and card.mismatch_card:
            card = by_name[card.mismatch_card].with_values({})
        if not names_in_log.isdisjoint(card.echo_of):
            card = structs.replace(card, role=Role.ECHO)
        changed.append(structs.replace(sighting, card=card))
    failures = [sighting.card for sighting in changed if sighting.card.role not in (Role.HINT, Role.NOTE)]
    has_reason = any(
        card.role in (Role.CAUSE, Role.WAIT) or (card.role is Role.FAILURE and card.shows_only != "library")
        for card in failures
    )
    warning_is_failure = "" in line_counts or (bool(failures) and not has_reason)
    for at, sighting in enumerate(changed):
        if _is_warning(sighting.card) and warning_is_failure:
            changed[at] = structs.replace(sighting, card=structs.replace(sighting.card, role=Role.FAILURE))
        elif sighting.card.is_retried and has_reason:
            changed[at] = structs.replace(sighting, card=structs.replace(sighting.card, role=Role.NOTE))
        elif not failures and (absent := _absent_ranks(sighting, line_counts)):
            waiting_card = structs.replace(sighting.card, role=Role.WAIT)
            changed[at] = structs.replace(sighting, card=waiting_card, missing_ranks=absent)
    return changed


def _absent_ranks(sighting: Sighting, line_counts: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks that have not joined where the log ends. Empty if all have, or if the log goes on."""
    last_log = [*sighting.lines_by_log][-1]
    has_ended = line_counts[last_log] - sighting.last_line <= _MAX_LINES_AFTER_JOINING
    joined = {*sighting.ranks}
    return tuple(rank for rank in range(min(sighting.world, _MAX_NAMES)) if rank not in joined) if has_ended else ()


def _is_warning(card: Card) -> bool:
    return card.is_fallback and card.role is Role.HINT


def sort_sightings(sightings: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """Sort sightings by role, and then by time or line, so that a cause comes before its consequences.

    A rank that others waited for is not missing if it waited, too: it is removed from `missing_ranks`. A wait for
    which no missing rank remains is listed after the other waits.
    """
    waits = [sighting for sighting in sightings if sighting.card.role is Role.WAIT]
    waiting = {rank for sighting in waits for rank in (*sighting.ranks, sighting.card.waiting_rank)}
    missing = [tuple(rank for rank in sighting.missing_ranks if rank not in waiting) for sighting in sightings]
    checked = [structs.replace(old, missing_ranks=ranks) for old, ranks in zip(sightings, missing, strict=True)]
    resolved = {old.card.name for old, ranks in zip(sightings, missing, strict=True) if old.missing_ranks and not ranks}
    failures = [sighting for sighting in sightings if sighting.card.role is Role.FAILURE]
    known = [one.first for one in failures if not one.card.shows_only and not one.card.is_fallback]

    def is_detailed(sighting: Sighting) -> bool:
        log, line = sighting.first.log_number, sighting.first.line
        return any(one.log_number == log and 0 < one.line - line <= _MAX_LINES_TO_DETAIL for one in known)

    def has_origin(sighting: Sighting) -> bool:
        return bool(sighting.ranks or sighting.local_ranks or sighting.tasks or sighting.hosts)

    # Times order the texts of several logs if all failures and waits have one; the lines of one log are in order.
    shown = [sighting for sighting in sightings if sighting.card.role in (Role.CAUSE, Role.FAILURE, Role.WAIT)]
    has_several_logs = len({old.first.log_number for old in shown}) > 1
    uses_times = has_several_logs and all(old.first.time is not None for old in shown)

    def place(sighting: Sighting) -> tuple[float, bool, int, int]:
        first = sighting.first
        # The launcher's log of exits is read before the ranks' own logs, which say more.
        is_exit = has_several_logs and sighting.card.shows_only == "process"
        return (first.time or 0.0) if uses_times else 0.0, is_exit, first.log_number, first.line

    def sort_key(sighting: Sighting) -> tuple[int, bool, tuple[float, bool, int, int]]:
        role_place = _PLACE_OF_ROLE[sighting.card.role]
        if sighting.card.is_fallback and sighting.card.role in (Role.FAILURE, Role.HINT):
            # An unknown text may follow from an earlier wait, unless both name ranks or hosts.
            earlier_waits = [wait for wait in waits if place(wait) < place(sighting)]
            have_origins = all(map(has_origin, (sighting, *earlier_waits))) or not earlier_waits
            is_late = _is_warning(sighting.card) or not have_origins
            role_place = _PLACE_AFTER_WAITS if is_late else _PLACE_AFTER_FAILURES if known else role_place
        elif sighting.card.role is Role.FAILURE and sighting.card.shows_only == "library" and is_detailed(sighting):
            role_place = _PLACE_AFTER_FAILURES
        return role_place, sighting.card.name in resolved, place(sighting)

    return tuple(sorted(checked, key=sort_key))
