"""The matcher: finds cards (error texts of other programs, and what each means) in a log.

The log is read once, in blocks of lines. Each block is searched for every card's anchor, which goes at the speed of
memory. Only a line that contains an anchor is decoded and matched against patterns, and no pattern sees more than a few
thousand characters. So the time grows with the length of the log alone.

A line that no card knows is quoted by a fallback card if it is a warning of NCCL, an error of CUDA or an exception of
Python. An exception is not counted as a failure if it was raised because of a known text, or by a process that had
already printed one.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from ddpdiag.explain.card import Card, Role, all_cards
from ddpdiag.explain.lines import (
    UNKNOWN_ORIGIN,
    WHOLE,
    Origin,
    Traceback,
    message_after,
    read_line,
    read_prefixes,
    table_origin,
    tracebacks,
    window,
)
from ddpdiag.explain.tally import Call, Explanation, Sighting, Tally, in_order, related
from ddpdiag.sanitize import without_secrets

__all__ = ["Call", "Explanation", "Sighting", "all_cards", "explain_log", "read_line"]

# A block is searched some hundred times: it should stay in the processor's cache.
_BLOCK_BYTES = 1 << 18
_LOOK_BACK = 400
_EXCERPT = 300
# Kinds of exceptions that are distinguished; a log that raises more has another problem.
_MOST_KINDS = 20
_MOST_ORIGINS = 100_000
_COLOUR = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_LINE_END = re.compile(rb"[\r\n]")
# Before the anchor, this shows that NCCL continues: without a missing plug-in, or with another try to connect.
_TALK = b" NCCL INFO "
_HARMLESS = (Role.HINT, Role.NOTE)

_Key = tuple[str, str]


def explain_log(pieces: Iterable[bytes], source: str, cards: Sequence[Card] | None = None) -> Explanation:
    """Explain a log that is read in `pieces` of any size; `source` is its name. It need not be UTF-8."""
    known = all_cards() if cards is None else cards
    matcher = _Matcher(known)
    for block in _blocks(pieces):
        matcher.read(block)
    sightings = related(matcher.sightings(), known, is_log=bool(source))
    return Explanation(sightings=in_order(sightings), lines=matcher.lines, source=source)


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join pieces to blocks of whole lines, without colours. A line that is longer than a block is cut."""
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


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a card's pattern at its first use. There are more patterns than the cache of `re` keeps."""
    return re.compile(pattern)


class _Matcher:
    """Reads a log block by block, and tallies the lines of each card and kind. `lines` were read."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self.lines = 0
        self._tallies: dict[_Key, Tally] = {}
        self._cards = [(card, card.anchor.encode()) for card in cards if not card.in_traceback]
        self._in_traceback = [card for card in cards if card.in_traceback]
        # By origin: the card and kind of its last exception; the role of its first known text that is no hint or note.
        self._raised: dict[Origin, _Key] = {}
        self._failed: dict[Origin, Role] = {}

    def read(self, block: bytes) -> None:
        """Read the next block of lines, and tally the known texts in it."""
        raised = {found.start: found for found in tracebacks(block, is_first=self.lines == 0)}
        counted, line = 0, self.lines + 1
        # Lines that hold an anchor, by their beginning: where each ends, and which cards' anchors are where.
        lines: dict[int, tuple[int, list[tuple[Card, int]]]] = {}
        # Looking back for a line's beginning would take long where lines end with carriage returns only.
        ends = _Ends(block)
        for card, anchor in self._cards:
            at = block.find(anchor)
            while at >= 0:
                start, end = ends.around(at)
                lines.setdefault(start, (end, []))[1].append((card, at))
                at = block.find(anchor, end)
        for start in raised:
            begin, end = ends.around(start)
            lines.setdefault(begin, (end, []))[1].extend((card, begin) for card in self._in_traceback)
        for start, (end, hits) in sorted(lines.items()):
            line += block.count(b"\n", counted, start)
            counted = start
            self._line(block, start, end, hits, line, raised.get(start))
        self.lines += block.count(b"\n") + (not block.endswith(b"\n"))

    def sightings(self) -> list[Sighting]:
        """The sightings, in the order of the cards' first lines."""
        return [tally.sighting() for tally in self._tallies.values()]

    def _line(
        self,
        block: bytes,
        start: int,
        end: int,
        hits: Sequence[tuple[Card, int]],
        number: int,
        traceback: Traceback | None,
    ) -> None:
        """Tally the line for the first card of `hits` that fits it."""
        line = block[start:end]
        whole = read_line(window(line, 0)) if len(line) <= WHOLE else None
        for card, at in hits:
            if card.role not in _HARMLESS and block.find(_TALK, start, at) >= 0:
                continue
            if traceback is not None and traceback.is_ignored and card.fallback:
                continue
            origin, text = whole or read_line(window(line, at - start))
            if traceback is not None and card.in_traceback:
                text = traceback.text
            elif "\n" in text:
                # A JSON object's message.
                text = next((read_line(part)[1] for part in text.split("\n") if card.anchor in part), text)
            match = _compiled(card.pattern).search(text)
            if match is None:
                continue
            if card.in_table:
                origin = table_origin(block[max(0, start - _LOOK_BACK) : start].decode("utf-8", "replace"), origin)
            groups = {name: value for name, value in match.groupdict().items() if value}
            key = card.name, groups.get("kind", "")
            if card.fallback and key not in self._tallies and text.endswith(":"):
                text += f" {message_after(block, end, read_prefixes(window(line, 0))[0])}"
            if tally := self._tally(card, key, number, text):
                self._follow(key, tally, origin, traceback)
                tally.add(number, origin, groups)
            return

    def _tally(self, card: Card, key: _Key, number: int, text: str) -> Tally | None:
        """The tally of a card and kind, which is made at its first line. None if the card has too many kinds."""
        if key not in self._tallies:
            if key[1] and sum(name == card.name for name, _ in self._tallies) >= _MOST_KINDS:
                return None
            self._tallies[key] = Tally(card, number, without_secrets(text.strip())[:_EXCERPT])
        return self._tallies[key]

    def _follow(self, key: _Key, tally: Tally, origin: Origin, traceback: Traceback | None) -> None:
        """Note in `tally` whether an unknown text follows from what its process printed before."""
        card = tally.card
        root = None
        if traceback is not None:
            tally.frame = tally.frame or traceback.frame
            root = self._tallies.get(self._raised.get(traceback.origin, ("", ""))) if traceback.is_chained else None
            if len(self._raised) < _MOST_ORIGINS:
                self._raised[traceback.origin] = key
        if not card.fallback:
            if card.role not in _HARMLESS and origin != UNKNOWN_ORIGIN and len(self._failed) < _MOST_ORIGINS:
                self._failed.setdefault(origin, card.role)
            return
        # Several processes of a host write exceptions; NCCL names the host only.
        before = self._failed.get(origin) if origin.is_process or card.role is Role.HINT else None
        if root is not None and root is not tally and root.card.fallback and root.count == 1:
            # The last exception of a chain is the one that ended the process; the others were handled.
            root.is_first = False
        elif root is not None and root.card.role not in _HARMLESS:
            before = root.card.role
        if before is None:
            tally.is_first = True
        elif not tally.count:
            tally.follower = Role.ECHO if before is Role.ECHO else Role.NOTE


class _Ends:
    """Finds the lines of a block. A carriage return, with which progress bars begin anew, ends a line, too."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._places: list[int] | None = None

    def around(self, at: int) -> tuple[int, int]:
        """The start and end of the line that contains byte `at`."""
        if self._places is None:
            self._places = [match.start() for match in _LINE_END.finditer(self._block)]
        number = bisect_left(self._places, at)
        start = self._places[number - 1] + 1 if number else 0
        return start, self._places[number] if number < len(self._places) else len(self._block)
