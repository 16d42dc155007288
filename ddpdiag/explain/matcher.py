"""Find the symptoms in a log: one pass over blocks of lines, each searched for every symptom's anchor.

Searching for fixed words goes at the speed of memory; only a line that holds some is decoded and held against patterns,
and none of these looks at more than a few thousand characters. So the time grows with the length of the log alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ddpdiag.explain.cards import Explanation, Role, Sighting, Symptom
from ddpdiag.explain.lines import Speaker, read_line, table_speaker, window
from ddpdiag.explain.table import all_symptoms
from ddpdiag.foreign import without_secrets

# A block is searched some hundred times: it should stay in the processor's cache.
_BLOCK_BYTES = 1 << 18
_LOOK_BACK = 400
_EXCERPT = 300
# Kinds of exceptions that are told apart; a log that raises more has another problem.
_MOST_KINDS = 20
_MOST_NAMES = 100_000
_COLOUR = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
# Before the anchor, this tells that NCCL goes on: a plug-in that is not there, a connection that is tried again.
_TALK = b" NCCL INFO "
_HARMLESS = (Role.HINT, Role.NOTE)
_TABLE = "exitcode  : "  # the line of torchrun's table of failures
_ORDER = {role: place for place, role in enumerate(Role)}


@dataclass
class _Met:
    """A symptom while the log is read."""

    symptom: Symptom
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

    def add(self, line: int, speaker: Speaker, groups: Mapping[str, str]) -> None:
        self.count += 1
        self.last_line = line
        for number, known in (
            (speaker.rank, self.ranks),
            (speaker.local_rank, self.local_ranks),
            (speaker.task, self.tasks),
        ):
            if number is not None and len(known) < _MOST_NAMES:
                known.add(number)
        if speaker.host is not None and len(self.hosts) < _MOST_NAMES:
            self.hosts[speaker.host] = None
        self.missing.update(map(int, re.findall(r"\d+", groups.get("missing", ""))))
        if "work" in groups and speaker.rank is not None and len(self.works) < _MOST_NAMES:
            self.works[speaker.rank] = int(groups["work"])

    def sighting(self) -> Sighting:
        # A global rank tells more than the local one, which torchrun's prefix adds.
        local = () if self.ranks else tuple(sorted(self.local_ranks))
        return Sighting(
            symptom=self.symptom,
            count=self.count,
            line=self.line,
            last_line=self.last_line,
            excerpt=self.excerpt,
            ranks=tuple(sorted(self.ranks)),
            local_ranks=local,
            tasks=tuple(sorted(self.tasks)),
            hosts=tuple(self.hosts),
            missing=tuple(sorted(self.missing)),
            works={
                work: tuple(sorted(rank for rank, own in self.works.items() if own == work))
                for work in sorted(set(self.works.values()))
            },
        )


def explain_log(pieces: Iterable[bytes], source: str, symptoms: Sequence[Symptom] | None = None) -> Explanation:
    """What the log says, read in `pieces` of any size; `source` is its name. Whatever is no UTF-8 is read as well."""
    reader = _Reader(all_symptoms() if symptoms is None else symptoms)
    for block in _blocks(pieces):
        reader.read(block)
    return Explanation(
        sightings=in_order(one.sighting() for one in reader.met.values()), lines=reader.lines, source=source
    )


def in_order(met: Iterable[Sighting]) -> tuple[Sighting, ...]:
    """What explains the others first: by role, then by line.

    A rank that others waited for, and that waited itself, is not the one that is missing; who waited for such ranks
    only comes after those who waited for others.
    """
    every = list(met)
    waits = [one for one in every if one.symptom.role is Role.WAIT]
    waiting = {rank for one in waits for rank in one.ranks}
    # The store's server speaks, which is rank 0's.
    waiting |= {0} if any(one.symptom.name == "clients-missing" for one in waits) else set()
    settled = [
        structs.replace(one, missing=tuple(rank for rank in one.missing if rank not in waiting)) for one in every
    ]
    misled = {new.symptom.name: bool(old.missing) and not new.missing for old, new in zip(every, settled, strict=True)}
    return tuple(sorted(settled, key=lambda one: (_ORDER[one.symptom.role], misled[one.symptom.name], one.line)))


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
            yield _plain(whole + newline if newline else tail)
            rest = [tail] if newline else []
            held = len(tail) if newline else 0
    if held:
        yield _plain(b"".join(rest))


def _plain(block: bytes) -> bytes:
    return _COLOUR.sub(b"", block) if b"\x1b" in block else block


class _Reader:
    """What was met so far, and how many lines were read."""

    def __init__(self, symptoms: Sequence[Symptom]) -> None:
        self.lines = 0
        self.met: dict[tuple[str, str], _Met] = {}
        self._symptoms = symptoms
        self._anchors = [symptom.anchor.encode() for symptom in symptoms]
        self._patterns = [re.compile(symptom.pattern) if symptom.pattern else None for symptom in symptoms]

    def read(self, block: bytes) -> None:
        """A block of lines."""
        counted, line = 0, self.lines + 1
        for start, (end, hits) in sorted(self._hits(block).items()):
            line += block.count(b"\n", counted, start)
            counted = start
            self._line(block, start, end, hits, line)
        self.lines += block.count(b"\n") + (not block.endswith(b"\n"))

    def _hits(self, block: bytes) -> dict[int, tuple[int, list[tuple[int, int]]]]:
        """Lines that hold an anchor, by their beginning: where each ends, and which anchors stand where."""
        lines: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for index, anchor in enumerate(self._anchors):
            at = block.find(anchor)
            while at >= 0:
                start, end = _bounds(block, at)
                lines.setdefault(start, (end, []))[1].append((index, at))
                at = block.find(anchor, end)
        return lines

    def _line(self, block: bytes, start: int, end: int, hits: Sequence[tuple[int, int]], number: int) -> None:
        """The first symptom that fits the line."""
        for index, at in hits:
            symptom, pattern = self._symptoms[index], self._patterns[index]
            if symptom.role not in _HARMLESS and block.find(_TALK, start, at) >= 0:
                continue
            speaker, text = read_line(window(block[start:end], at - start))
            match = pattern.search(text) if pattern is not None else None
            if pattern is not None and match is None:
                continue
            if symptom.anchor.startswith(_TABLE.split()[0]):
                speaker = table_speaker(block[max(0, start - _LOOK_BACK) : start].decode("utf-8", "replace"), speaker)
            groups = {name: value for name, value in (match.groupdict() if match else {}).items() if value}
            met = self._met(symptom, groups.get("kind", ""), number, text)
            if met is not None:
                met.add(number, _told(speaker, groups), groups)
            return

    def _met(self, symptom: Symptom, kind: str, number: int, text: str) -> _Met | None:
        """What is known of the symptom; None if there are too many kinds of it."""
        key = symptom.name, kind
        if key not in self.met:
            if kind and sum(name == symptom.name for name, _ in self.met) >= _MOST_KINDS:
                return None
            self.met[key] = _Met(symptom, number, without_secrets(text.strip())[:_EXCERPT])
        return self.met[key]


def _told(speaker: Speaker, groups: Mapping[str, str]) -> Speaker:
    """What the text itself says of who speaks counts more than its prefixes."""
    rank, host = groups.get("rank"), groups.get("host")
    return speaker._replace(rank=int(rank) if rank else speaker.rank, host=host or speaker.host)


def _bounds(block: bytes, at: int) -> tuple[int, int]:
    """Where the line of `at` begins and ends; a progress bar that begins anew with a carriage return is a line."""
    start = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
    end = block.find(b"\n", at)
    end = len(block) if end < 0 else end
    back = block.find(b"\r", at, end)
    return start, back if back >= 0 else end
