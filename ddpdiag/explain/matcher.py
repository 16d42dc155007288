"""The matcher: finds cards (error texts of other programs, and what each means) in a log.

One pass over blocks of lines, each searched for every card's anchor: searching for fixed words goes at the speed of
memory; only a line that holds some is decoded and held against patterns, and none of these looks at more than a few
thousand characters. So the time grows with the length of the log alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.explain.card import Card, Role, all_cards
from ddpdiag.foreign import without_secrets
from ddpdiag.stats import odd_ones_out


class Call(NamedTuple):
    """The collective that ranks name under a number; `elements` where all ranks must give as many."""

    operation: str
    elements: int | None = None


class Sighting(Struct, frozen=True, kw_only=True):
    """A card's text in a log: how often, in which lines, and the ranks and hosts that printed it.

    `ranks`, `tasks` (of `srun -l`), `local_ranks` (of torchrun's own prefix) and `hosts` are those that the lines name.
    `missing` are ranks that others waited for; `works` the ranks whose last collective had each number. `calls` are
    the different ones that ranks name of number `differing`, the most common one last. `line` is the first line,
    `excerpt` its text.
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


class Explanation(Struct, frozen=True, kw_only=True):
    """What a text or a log contains: the sightings, the one that explains the others first; `lines` were read."""

    sightings: tuple[Sighting, ...]
    lines: int
    source: str

    @property
    def is_explained(self) -> bool:
        """Does any of it show more than that another process failed?"""
        return any(one.card.role not in (Role.ECHO, Role.NOTE) for one in self.sightings)


# A block is searched some hundred times: it should stay in the processor's cache.
_BLOCK_BYTES = 1 << 18
# Longer lines are progress bars and dumps; what is searched for is near its anchor.
_BEFORE, _AFTER, _HEAD = 1_000, 2_000, 200
_LOOK_BACK = 400
_EXCERPT = 300
# Kinds of exceptions that are distinguished; a log that raises more has another problem.
_MOST_KINDS = 20
_MOST_NAMES = 100_000
# Of these every rank must give as many elements as the others. What has two sides is called differently on each.
_EQUAL_SIZES = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "BARRIER"})
_TWO_SIDED = frozenset({"SEND", "RECV", "COALESCED"})
_COLOUR = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
# Before the anchor, this shows that NCCL continues: without a missing plug-in, or with another try to connect.
_TALK = b" NCCL INFO "
_HARMLESS = (Role.HINT, Role.NOTE)
_ORDER = {role: place for place, role in enumerate(Role)}

# `srun -l`, `pdsh`, Open MPI's --tag-output, torch's own [rank3]:, torchrun's --tee, Ray, time stamps of loggers.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<task>\d{1,6}): ",
        r"\[(?:\d{1,6},)?(?P<rank>\d{1,6})\]<std(?:out|err|diag)>:\s?",
        r"\([A-Za-z]\w{0,60} pid=\d{1,9}(?:, ip=(?P<host>[0-9a-fA-F.:]{1,45}))?\) ?",
        r"\[rank[ ]?(?P<rank>\d{1,6})\]:\s?",
        r"\[[a-z_]{1,40}(?P<local_rank>\d{1,6})\]:\s?",
        # Names with a counter (gpu1, worker1) are no hosts; gpu01 and worker-01 are, since counters have no leading 0.
        r"(?!python|(?:epoch|step|iter|iteration|batch|rank|line)[-_]?\d*: |(?:gpu|cuda|worker)[-_]?(?!0\d)\d*: )"
        r"(?:slurmstepd-)?(?P<host>[a-z][a-z.-]{0,60}\d[a-z0-9.-]{0,60}): ",
        r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?\]?[ \t]{1,4}",
    )
)
# A logger's time, srun's task, torchrun's rank and torch's own: nothing has more.
_MOST_PREFIXES = 5
_ORIGINS = (
    re.compile(r"\bRank (?P<rank>\d{1,6})\]"),
    re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]{0,80}):\d{1,7}:\d{1,7} \[\d{1,3}\]"),
)
# torchrun's table of failures has a line for each; one of four lies between the rank and its exit code.
_TABLE_RANK = re.compile(r"rank {6}: (\d{1,6}) ")
_TABLE_HOST = re.compile(r"host {6}: (\S{1,100})")


class Origin(NamedTuple):
    """The rank and host that printed a line, as far as the line shows them."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str | None = None


@dataclass
class _Tally:
    """What was seen so far of a card."""

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

    def add(self, line: int, origin: Origin, groups: Mapping[str, str]) -> None:
        """One more line. Ranks and hosts that the text itself names count more than those of its prefixes."""
        self.count += 1
        self.last_line = line
        rank, host = int(groups["rank"]) if "rank" in groups else origin.rank, groups.get("host", origin.host)
        for number, known in (rank, self.ranks), (origin.local_rank, self.local_ranks), (origin.task, self.tasks):
            if number is not None and len(known) < _MOST_NAMES:
                known.add(number)
        if host is not None and len(self.hosts) < _MOST_NAMES:
            self.hosts[host] = None
        self.missing.update(map(int, re.findall(r"\d+", groups.get("missing", ""))))
        if "work" in groups and rank is not None and len(self.works) < _MOST_NAMES:
            self.works[rank] = int(groups["work"])
            if groups.get("operation", "SEND") not in _TWO_SIDED:
                self.calls.setdefault((groups.get("group", ""), int(groups["work"])), {})[rank] = _call(groups)

    def differing(self) -> tuple[int | None, tuple[tuple[Call, tuple[int, ...]], ...]]:
        """The first number of which ranks name different collectives, and these with their ranks."""
        for (_, work), by_rank in sorted(self.calls.items(), key=lambda item: item[0][1]):
            if (odd := odd_ones_out(by_rank)) is not None:
                sides = {by_rank[ranks[0]]: ranks for ranks in odd.groups.values()}
                return work, tuple(sorted(sides.items(), key=lambda side: (len(side[1]), side[1])))
        return None, ()

    def sighting(self) -> Sighting:
        differing, calls = self.differing()
        return Sighting(
            differing=differing,
            calls=calls,
            card=self.card,
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


def explain_log(pieces: Iterable[bytes], source: str, cards: Sequence[Card] | None = None) -> Explanation:
    """What the log contains, read in `pieces` of any size; `source` is its name. It need not be UTF-8."""
    known = all_cards() if cards is None else cards
    matcher = _Matcher(known)
    for block in _blocks(pieces):
        matcher.read(block)
    sightings = _in_order(_related([tally.sighting() for tally in matcher.tallies.values()], known))
    return Explanation(sightings=sightings, lines=matcher.lines, source=source)


def _call(groups: Mapping[str, str]) -> Call:
    elements = groups.get("elements")
    return Call(groups["operation"], int(elements) if elements and groups["operation"] in _EQUAL_SIZES else None)


def _related(sightings: Sequence[Sighting], cards: Sequence[Card]) -> list[Sighting]:
    """The sightings in the light of each other: which only echo another one, and which prove that ranks differ."""
    by_name = {card.name: card for card in cards}
    seen = {one.card.name for one in sightings}
    related = []
    for one in sightings:
        card = by_name[one.card.mismatch] if one.calls and one.card.mismatch else one.card
        if not seen.isdisjoint(card.echo_of):
            card = structs.replace(card, role=Role.ECHO)
        related.append(structs.replace(one, card=card))
    return related


def _in_order(sightings: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """What explains the others first: by role, then by line.

    A rank that others waited for, and that waited itself, is not the missing one; ranks that waited only for such ranks
    are listed after those that waited for others.
    """
    waits = [one for one in sightings if one.card.role is Role.WAIT]
    waiting = {rank for one in waits for rank in (*one.ranks, one.card.waiting_rank)}
    settled = [
        structs.replace(one, missing=tuple(rank for rank in one.missing if rank not in waiting)) for one in sightings
    ]
    misled = {new.card.name for old, new in zip(sightings, settled, strict=True) if old.missing and not new.missing}
    return tuple(sorted(settled, key=lambda one: (_ORDER[one.card.role], one.card.name in misled, one.line)))


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, without colours; a line that is longer than a block is cut."""
    rest: list[bytes] = []
    held = 0
    for piece in pieces:
        for start in range(0, len(piece), _BLOCK_BYTES):
            part = piece[start : start + _BLOCK_BYTES]
            rest.append(part)
            held += len(part)
            if held < _BLOCK_BYTES:
                continue
            whole, newline, tail = b"".join(rest).rpartition(b"\n")
            yield _COLOUR.sub(b"", whole + newline if newline else tail)
            rest = [tail] if newline else []
            held = len(tail) if newline else 0
    if held:
        yield _COLOUR.sub(b"", b"".join(rest))


class _Matcher:
    """What was seen so far of each card and kind, and how many lines were read."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self.lines = 0
        self.tallies: dict[tuple[str, str], _Tally] = {}
        self._cards = [(card, card.anchor.encode()) for card in cards]

    def read(self, block: bytes) -> None:
        """A block of lines."""
        counted, line = 0, self.lines + 1
        for start, (end, hits) in sorted(self._hits(block).items()):
            line += block.count(b"\n", counted, start)
            counted = start
            self._line(block, start, end, hits, line)
        self.lines += block.count(b"\n") + (not block.endswith(b"\n"))

    def _hits(self, block: bytes) -> dict[int, tuple[int, list[tuple[Card, int]]]]:
        """Lines that hold an anchor, by their beginning: where each ends, and which cards' anchors are where."""
        lines: dict[int, tuple[int, list[tuple[Card, int]]]] = {}
        for card, anchor in self._cards:
            at = block.find(anchor)
            while at >= 0:
                start, end = _bounds(block, at)
                lines.setdefault(start, (end, []))[1].append((card, at))
                at = block.find(anchor, end)
        return lines

    def _line(self, block: bytes, start: int, end: int, hits: Sequence[tuple[Card, int]], number: int) -> None:
        """The first card that fits the line."""
        for card, at in hits:
            if card.role not in _HARMLESS and block.find(_TALK, start, at) >= 0:
                continue
            origin, text = read_line(_window(block[start:end], at - start))
            # Compiled when it is first needed, and kept by `re`.
            match = re.search(card.pattern, text)
            if match is None:
                continue
            if card.in_table:
                origin = _table_origin(block[max(0, start - _LOOK_BACK) : start].decode("utf-8", "replace"), origin)
            groups = {name: value for name, value in match.groupdict().items() if value}
            if tally := self._tally(card, groups.get("kind", ""), number, text):
                tally.add(number, origin, groups)
            return

    def _tally(self, card: Card, kind: str, number: int, text: str) -> _Tally | None:
        """What was seen of the card; None if there are too many kinds of it."""
        key = card.name, kind
        if key not in self.tallies:
            if kind and sum(name == card.name for name, _ in self.tallies) >= _MOST_KINDS:
                return None
            self.tallies[key] = _Tally(card, number, without_secrets(text.strip())[:_EXCERPT])
        return self.tallies[key]


def _bounds(block: bytes, at: int) -> tuple[int, int]:
    """Where the line of `at` begins and ends; a progress bar that begins anew with a carriage return is a line."""
    start = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
    end = block.find(b"\n", at)
    end = len(block) if end < 0 else end
    back = block.find(b"\r", at, end)
    return start, back if back >= 0 else end


def _window(line: bytes, at: int) -> str:
    """The line as text; of a long one its head and what lies around `at`."""
    if len(line) > _HEAD + _BEFORE + _AFTER:
        line = line[:_HEAD] + line[max(_HEAD, at - _BEFORE) : at + _AFTER]
    return line.decode("utf-8", "replace")


def read_line(text: str) -> tuple[Origin, str]:
    """The line's origin, and the line without the prefixes of launchers and loggers."""
    named: dict[str, str] = {}
    for _ in range(_MOST_PREFIXES):
        match = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if match is None:
            break
        named |= {name: value for name, value in match.groupdict().items() if value is not None}
        text = text[match.end() :]
    for pattern in _ORIGINS:
        if match := pattern.search(text):
            named = match.groupdict() | named
    host = named.pop("host", None)
    return Origin(host=host, **{name: int(number) for name, number in named.items()}), text.rstrip()


def _table_origin(before: str, origin: Origin) -> Origin:
    """The worker of a line of torchrun's table of failures, from the lines before it."""
    ranks, hosts = _TABLE_RANK.findall(before), _TABLE_HOST.findall(before)
    return origin._replace(rank=int(ranks[-1]) if ranks else origin.rank, host=hosts[-1] if hosts else origin.host)
