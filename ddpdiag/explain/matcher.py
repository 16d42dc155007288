"""Find the error texts of cards in the logs of a job.

Each log is read once, in blocks of lines. Each block is searched for every card's anchor, which is fast. Only lines
with an anchor are decoded and matched against patterns, and at most a few thousand characters of each. So the time
depends on the length of the logs only.

A fallback card quotes an unknown text: a warning of NCCL, an error of CUDA or an exception of Python. The unknown text
does not count as a failure if it follows from a known text: the same process had printed the known text before, or the
exception was raised because of it.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache

from msgspec import structs

from ddpdiag.explain.card import Card, Role, all_cards
from ddpdiag.explain.lines import (
    MAX_LINE_BYTES,
    UNKNOWN_ORIGIN,
    Origin,
    Traceback,
    clip_line,
    completed,
    message_after,
    read_line,
    read_prefixes,
    table_origin,
    tracebacks,
)
from ddpdiag.explain.log_files import Log, origin_of_head, time_near
from ddpdiag.explain.tally import (
    Call,
    Explanation,
    FirstLine,
    Sighting,
    Tally,
    sort_sightings,
    with_final_roles,
)
from ddpdiag.sanitize import without_secrets

__all__ = ["Call", "Explanation", "Log", "Sighting", "all_cards", "explain_job", "explain_log", "read_line"]

# A block is searched some hundred times, so it should fit into the processor's cache.
_BLOCK_BYTES = 1 << 18
_LOOK_BACK_BYTES = 400
_MAX_EXCERPT_LETTERS = 300
# At most so many kinds of exceptions are counted apart.
_MAX_KINDS = 20
_MAX_ORIGINS = 100_000
_COLOUR_CODE = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_LINE_END = re.compile(rb"[\r\n]")
# Lines that were joined when a terminal was copied: each is filled with spaces up to the terminal's width.
_JOINED = re.compile(
    rb"(?<= {8})(?=(?P<frame>File \")|\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\[rank\d"
    rb"|[A-Za-z_][\w.]{1,60}(?:Error|Exception): )"
)
# A traceback in one line, as services show the reason of a failed job.
_ONE_LINE_TRACEBACK = re.compile(rb"Traceback \(most recent call last\): +File \"[^\r\n]{1,20000}")
_TRACEBACK_PART = re.compile(rb" (?=(?P<frame>File \")|[A-Za-z_][\w.]{1,60}(?:Error|Exception): )")
# If this precedes the anchor, NCCL continues: without a missing plug-in, or with another attempt to connect.
_INFO_MARKER = b" NCCL INFO "
_HARMLESS_ROLES = (Role.HINT, Role.NOTE)

_TallyKey = tuple[str, str]


def explain_log(pieces: Iterable[bytes], source: str, cards: Sequence[Card] | None = None) -> Explanation:
    """Explain a log in `pieces` of any size and encoding. `source` is its name, and empty for a pasted text."""
    return explain_job([Log(source, pieces)], cards)


def explain_job(logs: Iterable[Log], cards: Sequence[Card] | None = None) -> Explanation:
    """Explain the logs of one job."""
    all_known = all_cards() if cards is None else cards
    matcher = _Matcher(all_known)
    line_counts = {}
    for log in logs:
        matcher.begin(log)
        for block in _blocks(log.pieces):
            matcher.read(block)
        line_counts[log.name] = matcher.line_count
    sightings = with_final_roles(matcher.sightings(), all_known, line_counts)
    return Explanation(sightings=sort_sightings(sightings), line_counts=line_counts)


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join pieces to blocks of complete lines, and remove colour codes. A line that is longer than a block is split."""
    rest: list[bytes] = []
    rest_bytes = 0
    for piece in pieces:
        for start in range(0, len(piece), _BLOCK_BYTES):
            part = piece[start : start + _BLOCK_BYTES]
            rest.append(part)
            rest_bytes += len(part)
            if rest_bytes < _BLOCK_BYTES:
                continue
            complete_lines, newline, tail = b"".join(rest).rpartition(b"\n")
            yield _plain(complete_lines + newline if newline else tail)
            rest = [tail] if newline else []
            rest_bytes = len(tail) if newline else 0
    if rest_bytes:
        yield _plain(b"".join(rest))


def _plain(block: bytes) -> bytes:
    """The block without colour codes, and with a carriage return between joined lines: all lines keep their numbers."""

    def part(match: re.Match[bytes]) -> bytes:
        before = match.string[max(0, match.start() - _LOOK_BACK_BYTES) : match.start()].rstrip(b" ")
        is_indentation = not before or before[-1] in b"\r\n"
        return match[0] if is_indentation else b"\r  " if match["frame"] else b"\r"

    block = _JOINED.sub(part, _COLOUR_CODE.sub(b"", block))
    return _ONE_LINE_TRACEBACK.sub(lambda whole: _TRACEBACK_PART.sub(part, whole[0]), block)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)  # there are more patterns than the cache of `re` holds


class _Matcher:
    """Reads logs block by block, and counts the lines of each card and kind. `line_count`: lines of the last log."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self.line_count = 0
        self._log_number, self._log_name, self._origin = -1, "", UNKNOWN_ORIGIN
        self._tallies: dict[_TallyKey, Tally] = {}
        self._cards = [(card, card.anchor.encode()) for card in cards if not card.in_traceback]
        self._exception_cards = [card for card in cards if card.in_traceback]
        # By origin: the card and kind of the last exception, and the role of the first known text (no hint or note).
        self._exceptions: dict[Origin, _TallyKey] = {}
        self._failures: dict[Origin, Role] = {}
        self._host_by_rank: dict[int, str] = {}

    def begin(self, log: Log) -> None:
        """Begin with the next log."""
        self.line_count = 0
        self._log_number += 1
        self._log_name, self._origin = log.name, log.origin
        # What was printed earlier is known within one log only.
        self._exceptions.clear()
        self._failures.clear()

    def read(self, block: bytes) -> None:
        """Count the known texts in the next block of lines."""
        if self.line_count == 0:
            self._origin = origin_of_head(block, self._origin)
        traceback_at = {traceback.start: traceback for traceback in tracebacks(block, is_first=self.line_count == 0)}
        counted_bytes, line_number = 0, self.line_count + 1
        # The lines with anchors, by their first byte: the end of the line, and each card with the byte of its anchor.
        hits_by_line: dict[int, tuple[int, list[tuple[Card, int]]]] = {}
        for card, anchor in self._cards:
            at = block.find(anchor)
            while at >= 0:
                start, end = _line_around(block, at)
                hits_by_line.setdefault(start, (end, []))[1].append((card, at))
                at = block.find(anchor, end)
        for start in traceback_at:
            begin, end = _line_around(block, start)
            hits_by_line.setdefault(begin, (end, []))[1].extend((card, begin) for card in self._exception_cards)
        for start, (end, hits) in sorted(hits_by_line.items()):
            line_number += block.count(b"\n", counted_bytes, start)
            counted_bytes = start
            self._tally_line(block, start, end, hits, line_number, traceback_at.get(start))
        self.line_count += block.count(b"\n") + (not block.endswith(b"\n"))

    def sightings(self) -> list[Sighting]:
        """The sightings, with the hosts of their ranks where any line or path names both."""
        sightings = [tally.sighting() for tally in self._tallies.values()]
        return [old if old.hosts else structs.replace(old, hosts=self._hosts_of(old.ranks)) for old in sightings]

    def _hosts_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        known = all(rank in self._host_by_rank for rank in ranks)
        return tuple(dict.fromkeys(self._host_by_rank[rank] for rank in ranks)) if known else ()

    def _tally_line(
        self,
        block: bytes,
        start: int,
        end: int,
        hits: Sequence[tuple[Card, int]],
        number: int,
        traceback: Traceback | None,
    ) -> None:
        """Count the line for the first card of `hits` that fits it. A hit is a card and the byte of its anchor."""
        line = block[start:end]
        whole_line = read_line(clip_line(line, 0)) if len(line) <= MAX_LINE_BYTES else None
        for card, at in hits:
            if card.role not in _HARMLESS_ROLES and block.find(_INFO_MARKER, start, at) >= 0:
                continue
            if traceback is not None and traceback.is_ignored and card.is_fallback:
                continue
            origin, text = whole_line or read_line(clip_line(line, at - start))
            if traceback is not None and (card.in_traceback or card.anchor in traceback.text):
                text = traceback.text
            elif "\n" in text:
                # The message of a JSON object has several lines; only the line with the anchor counts.
                text = next((read_line(part)[1] for part in text.split("\n") if card.anchor in part), text)
            before = block[max(0, start - _LOOK_BACK_BYTES) : start]
            pattern = _compiled(card.pattern)
            if (match := pattern.search(text)) is None or (card.is_root_cause and b"Root Cause (first" not in before):
                continue
            origin = self._complete_origin(origin, before, card)
            groups = {name: value for name, value in match.groupdict().items() if value}
            key = card.name, groups.get("kind", "")
            if card.is_fallback and key not in self._tallies and text.endswith(":"):
                text += f" {message_after(block, end, read_prefixes(clip_line(line, 0))[0])}"
            tally = self._tallies.get(key)
            if tally is None or self._log_name not in tally.lines_by_log:
                place = FirstLine(self._log_number, self._log_name, number, text, time_near(block, start, end), origin)
                tally = self._begin_tally(card, key, place._replace(values=groups))
            if tally is not None:
                self._relate_to_earlier(key, tally, origin, traceback)
                tally.add(number, origin, groups, traceback.frame if traceback is not None else "")
            return

    def _complete_origin(self, origin: Origin, before: bytes, card: Card) -> Origin:
        """The origin of a line, with what the lines `before` it in torchrun's table or the log's path name."""
        if card.in_table:
            origin = table_origin(before.decode("utf-8", "replace"), origin)
        elif self._origin != UNKNOWN_ORIGIN:
            origin = completed(origin, self._origin)
        if origin.rank is not None and origin.host and len(self._host_by_rank) < _MAX_ORIGINS:
            self._host_by_rank.setdefault(origin.rank, origin.host)
        return origin

    def _begin_tally(self, card: Card, key: _TallyKey, first: FirstLine) -> Tally | None:
        """Begin with a log in the tally of a card and kind. Returns None if the card has too many kinds."""
        if key not in self._tallies and key[1] and sum(name == card.name for name, _ in self._tallies) >= _MAX_KINDS:
            return None
        first = first._replace(excerpt=without_secrets(first.excerpt.strip())[:_MAX_EXCERPT_LETTERS])
        tally = self._tallies.setdefault(key, Tally(card, first))
        tally.begin_log(first)
        return tally

    def _relate_to_earlier(self, key: _TallyKey, tally: Tally, origin: Origin, traceback: Traceback | None) -> None:
        """Record a text for later lines and, if it is unknown, whether it follows from an earlier text."""
        card = tally.card
        cause = None
        if traceback is not None:
            tally.frame = tally.frame or (traceback.frame if tally.first.log == self._log_name else "")
            if traceback.is_chained:
                cause = self._tallies.get(self._exceptions.get(traceback.origin, ("", "")))
            if len(self._exceptions) < _MAX_ORIGINS:
                self._exceptions[traceback.origin] = key
        if not card.is_fallback:
            if card.role not in _HARMLESS_ROLES and origin != UNKNOWN_ORIGIN and len(self._failures) < _MAX_ORIGINS:
                self._failures.setdefault(origin, card.role)
            return
        # A host does not identify the process of an exception. For a warning it must do: NCCL names only the host.
        role = self._failures.get(origin) if origin.is_process or card.role is Role.HINT else None
        if cause is not None and cause is not tally and cause.independent_count:
            # The last exception of a chain ended the process; the earlier ones were handled.
            cause.independent_count -= 1
        elif cause is not None and cause.card.role not in _HARMLESS_ROLES:
            role = cause.card.role
        if role is None:
            tally.independent_count += 1
        elif not tally.count:
            tally.follower_role = Role.ECHO if role is Role.ECHO else Role.NOTE


def _line_around(block: bytes, at: int) -> tuple[int, int]:
    """The start and end of the line that contains byte `at` of a block."""
    line_ends = _line_ends(block)
    number = bisect_left(line_ends, at)
    start = line_ends[number - 1] + 1 if number else 0
    return start, line_ends[number] if number < len(line_ends) else len(block)


@lru_cache(maxsize=1)
def _line_ends(block: bytes) -> list[int]:
    """The places of all line ends in a block. A carriage return, which progress bars print, also ends a line."""
    return [match.start() for match in _LINE_END.finditer(block)]
