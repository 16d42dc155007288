"""Many names in few characters: "n[0-3,7]" for hosts, "0-3,7" for ranks.

Host names come from strangers' recordings, so NodeSet gets only names that mean themselves: never "@group" (its default
resolver runs shell commands), nor brackets or operators ("n[0-999999999]" would fill the memory).
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

_MEANS_ITSELF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_RANGE = re.compile(r"(\d+)-(\d+)")
_BRACKETED = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)")


class _Piece(NamedTuple):
    """A part of the folded text that can be left out: `inner` is a name or a range within `before` and `after`."""

    before: str
    inner: str
    after: str
    names: int


def fold_hosts(names: Iterable[str], *, limit: int | None = None) -> str:
    """Host names folded; at most `limit` names or ranges, and how many hosts are left out: "n[0-3,7] +12 more".

    Names that NodeSet would not take literally are joined by commas behind the others.
    """
    return _fold_hosts(tuple(dict.fromkeys(names)), limit)


# Findings of one run blame the same hosts again and again, and folding 16,384 names takes 0.2 s.
@lru_cache(maxsize=64)
def _fold_hosts(names: tuple[str, ...], limit: int | None) -> str:
    literal = [name for name in names if _MEANS_ITSELF.fullmatch(name)]
    other = [name for name in names if not _MEANS_ITSELF.fullmatch(name)]
    pieces = [piece for part in _split(_fold(literal)) for piece in _pieces(part)]
    return _join([*pieces, *(_Piece("", name, "", 1) for name in other)], limit)


def _fold(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ",".join(names)


def _split(folded: str) -> list[str]:
    """The parts between commas outside brackets."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\])+", folded)


def _pieces(part: str) -> list[_Piece]:
    if "[" not in part:
        return [_Piece("", part, "", 1)]
    if (match := _BRACKETED.fullmatch(part)) is None:
        # Two dimensions ("n[0-1]-ib[0-3]"): stays whole.
        sizes = [sum(map(_width, inner.split(","))) for inner in re.findall(r"\[([^\]]*)\]", part)]
        total = 1
        for size in sizes:
            total *= size
        return [_Piece("", part, "", total)]
    before, inner, after = match.groups()
    return [_Piece(before, item, after, _width(item)) for item in inner.split(",")]


def _width(item: str) -> int:
    """How many numbers "4-7" or "4" holds."""
    match = _RANGE.fullmatch(item)
    return int(match[2]) - int(match[1]) + 1 if match else 1


def _join(pieces: Sequence[_Piece], limit: int | None) -> str:
    shown = pieces if limit is None else pieces[:limit]
    texts: list[str] = []
    # Neighbours with the same frame share one pair of brackets.
    frames: list[tuple[tuple[str, str], list[str]]] = []
    for piece in shown:
        frame = (piece.before, piece.after)
        if frame != ("", "") and frames and frames[-1][0] == frame:
            frames[-1][1].append(piece.inner)
        else:
            frames.append((frame, [piece.inner]))
    for (before, after), inner in frames:
        body = ",".join(inner)
        framed = (before or after) and ("," in body or "-" in body)
        texts.append(f"{before}[{body}]{after}" if framed else f"{before}{body}{after}")
    left = sum(piece.names for piece in pieces[len(shown) :])
    return ",".join(texts) + (f" +{left:,} more" if left else "")


def fold_ranks(ranks: Iterable[int], *, limit: int | None = None) -> str:
    """Ranks folded: "0-3,7"; at most `limit` numbers or ranges, and how many ranks are left out."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    pieces = [_Piece("", str(a) if a == b else f"{a}-{b}", "", b - a + 1) for a, b in runs]
    return _join(pieces, limit)
