"""Recordings of up to 10 MB that ask their reader for much time or memory: a few lines, repeated with other names."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

TESTS = Path(__file__).parent.parent
Line = dict[str, object]


def lines_of(name: str) -> list[Line]:
    path = TESTS / "recordings" / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(size: int, lines: Iterator[Line]) -> bytes:
    """As many of the lines as fit."""
    rows, room = [], size
    for line in lines:
        row = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        room -= len(row)
        if room < 0:
            break
        rows.append(row)
    return b"".join(rows)


def renamed(name: str, ranks: Callable[[int], Line]) -> Callable[[int], bytes]:
    """The recording, and each line of its last rank again for further ranks, of which `ranks` gives the place."""

    def lines(size: int) -> Iterator[Line]:
        known = lines_of(name)
        size //= sum(len(json.dumps(line)) for line in known if _rank(line) == 1)
        group = [*range(size)]
        for line in known:
            if line["type"] == "header":
                yield line | {"world_size": size}
            elif line["type"] == "trial":
                yield line | {"groups": [group[:50]]}
            elif line["type"] != "end":
                yield line
        for rank in range(2, size):
            for line in known:
                if _rank(line) == 1:
                    place = line.get("place")
                    yield line | ({"place": place | ranks(rank)} if isinstance(place, dict) else {"rank": rank})

    return lambda size: text_of(size, lines(size))


def _rank(line: Line) -> object:
    place = line.get("place")
    return place.get("rank") if isinstance(place, dict) else line.get("rank")


def repeated(name: str, kind: str, change: Callable[[Line, int], Line]) -> Callable[[int], bytes]:
    """The recording, with its last line of one kind again and again."""

    def lines() -> Iterator[Line]:
        known = lines_of(name)
        yield from (line for line in known if line["type"] != "end")
        last = [line for line in known if line["type"] == kind][-1]
        yield from (change(last, number) for number in count(1000))

    return lambda size: text_of(size, lines())


_rng = random.Random(0)


def _of_four_numbers(rank: int) -> Line:
    a, b, c = (_rng.randrange(1000) for _ in range(3))
    return {"rank": rank, "world_size": 100_000, "host": f"r{a}c{b}-{c}n{rank}"}


def _at(line: Line, number: int) -> Line:
    place = line["place"]
    assert isinstance(place, dict)
    return place | {"rank": number, "host": f"n{number}-{number % 7}-{number % 11}"}


def _events() -> Iterator[Line]:
    for at in range(60_000):
        event = {"type": "event", "rank": at, "seconds": 1.0, "detail": f"d{at}", "host": f"n{at}-{at}"}
        yield from (event | {"kind": kind} for kind in ("lost", "absent", "duplicate", "leaving"))


RECORDINGS: dict[str, Callable[[int], bytes]] = {
    "hosts": renamed("healthy-2-ranks.jsonl", _of_four_numbers),
    "hosts that fail": renamed("failures/rank_segfaults.jsonl", _of_four_numbers),
    "hosts that hang": renamed("failures/rank_sleeps.jsonl", _of_four_numbers),
    "slow hosts": renamed("failures/host_is_slow.jsonl", _of_four_numbers),
    "trials": repeated("healthy-2-ranks.jsonl", "trial", lambda line, number: line | {"number": number}),
    "failed trials": repeated(
        "failures/rank_segfaults.jsonl", "outcome", lambda line, number: line | {"trial": number, "rank": number}
    ),
    "outcomes": repeated("healthy-2-ranks.jsonl", "outcome", lambda line, number: line | {"rank": number}),
    "errors": repeated(
        "failures/rank_segfaults.jsonl",
        "outcome",
        lambda line, number: line | {"rank": number, "status": "raised", "error": f"CUDA error: {number}\n" * 20},
    ),
    "groups": repeated(
        "healthy-2-ranks.jsonl",
        "trial",
        lambda line, number: line | {"number": number, "groups": [[rank, rank + 1] for rank in range(0, 400, 2)]},
    ),
    "arrivals": repeated("healthy-2-ranks.jsonl", "arrival", lambda line, number: line | {"place": _at(line, number)}),
    "events": lambda size: text_of(size, iter((*lines_of("healthy-2-ranks.jsonl")[:3], *_events()))),
}
