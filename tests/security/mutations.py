"""Files that are nearly sound: bytes that changed, and JSON with other values, or without some. Seeded."""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

_NUMBERS = [0, -1, 1, 2, 7, 1 << 31, 1 << 63, 10**40, -0.5, 1e-320, 1e-99, 1e99, 1e308, -1e308]
_OTHERS = ["nan", "inf", "-inf", "1e308", "", "x", "\x1b[2J", "\ud800", None, True, [], {}, [[]], [0, -1], {"a": 1}]
_TOKENS = [b"\x00", b"\xff", b"\n", b"{", b"[" * 200, b'"', b"1e999", b"\x1b]0;", b"%s" * 3, b"-", b"," * 9, b"9" * 400]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few changes."""
    lines = data.split(b"\n")
    if data[:1] == b"{" and rng.random() < 0.8:
        for _ in range(rng.randint(1, 3)):
            _change_json(lines, rng)
    else:
        for _ in range(rng.randint(1, 4)):
            rng.choice(_BYTES)(lines, rng)
    return b"\n".join(lines)


def _change_json(lines: list[bytes], rng: random.Random) -> None:
    """Another value somewhere in one of the lines, or one less; a JSON text of many lines is one."""
    at = rng.randrange(len(lines))
    try:
        tree = json.loads(lines[at])
    except ValueError:
        try:
            tree = json.loads(b"\n".join(lines))
            lines[:] = [b""]
            at = 0
        except ValueError:
            return
    places = list(_places(tree)) if isinstance(tree, dict | list) else []
    if places:
        owner, key = rng.choice(places)
        if rng.random() < 0.15:
            del owner[key]
        else:
            number = isinstance(owner[key], int | float) and rng.random() < 0.7
            owner[key] = deepcopy(rng.choice(_NUMBERS if number else _OTHERS))
    lines[at] = json.dumps(tree).encode()


def _places(tree: Any) -> Any:
    """Each owner and key of a value in it."""
    waiting = [tree]
    while waiting:
        owner = waiting.pop()
        for key, value in list(owner.items() if isinstance(owner, dict) else enumerate(owner)):
            yield owner, key
            if isinstance(value, dict | list):
                waiting.append(value)


def _flip(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    if line := bytearray(lines[at]):
        line[rng.randrange(len(line))] = rng.randrange(256)
        lines[at] = bytes(line)


def _insert(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    place = rng.randint(0, len(lines[at]))
    lines[at] = lines[at][:place] + rng.choice(_TOKENS) + lines[at][place:]


def _cut(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    begin, end = sorted(rng.randint(0, len(lines[at])) for _ in range(2))
    lines[at] = lines[at][:begin] + lines[at][end:]


def _drop(lines: list[bytes], rng: random.Random) -> None:
    if len(lines) > 1:
        del lines[rng.randrange(len(lines))]


def _repeat(lines: list[bytes], rng: random.Random) -> None:
    lines.insert(rng.randint(0, len(lines)), rng.choice(lines))


_BYTES: list[Callable[[list[bytes], random.Random], None]] = [_flip, _insert, _cut, _drop, _repeat]
