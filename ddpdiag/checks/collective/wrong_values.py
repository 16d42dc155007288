"""Which rank or link corrupts values.

First, from what every rank received when one after the other broadcast known values: a rank whose own copy changed is
at fault; in the matrix of senders and receivers, a wrong row is a sender and a wrong column a receiver; a row and a
column together are the link between the two, and a single wrong cell is a link as well.

Where all broadcasts are correct, pairs of ranks sum by themselves, with new partners in each round: a rank whose pair
is wrong each time is at fault.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

# More than this share of a row or a column must be wrong to condemn it.
_MOST = 0.5


class Guilt(Struct, frozen=True):
    """Ranks, or else links (sender, receiver), to blame, and why; neither if the evidence cannot decide."""

    why: str
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()


def guilt(wrong_from: Mapping[int, Sequence[int]], senders: int) -> Guilt:
    """`wrong_from` says for every receiver whose broadcasts came out wrong there; ranks below `senders` broadcast."""
    changed = tuple(rank for rank, wrong in sorted(wrong_from.items()) if rank in wrong)
    if changed:
        return Guilt("its values are corrupted in its own memory, before they are sent", changed)
    links = tuple((sender, rank) for rank, wrong in sorted(wrong_from.items()) for sender in sorted(wrong))
    if not links:
        return Guilt("the values that ranks broadcast arrive unchanged, so the summation is at fault")
    if len(links) == 1:  # it has two ends, and condemns neither
        return Guilt(
            "only values on this link arrive wrong; the sender, the receiver or the path between them is at fault",
            links=links,
        )
    rows, columns = _shares(wrong_from, senders)
    bad_senders = tuple(rank for rank, share in rows.items() if share > _MOST)
    bad_receivers = tuple(rank for rank, share in columns.items() if share > _MOST)
    if bad_senders and not bad_receivers:
        return Guilt("the values that it sends arrive wrong, and those of the others arrive unchanged", bad_senders)
    if bad_receivers and not bad_senders:
        return Guilt("the values that it receives are wrong, and at the others they are correct", bad_receivers)
    return _link(rows, columns)


def suspects(ranks: Sequence[int], heard: Mapping[tuple[int, ...], bool]) -> tuple[int, ...]:
    """Who was in no pair that summed right; `heard` says of each pair whether its sum was wrong."""
    cleared = {rank for pair, wrong in heard.items() if not wrong for rank in pair}
    return tuple(rank for rank in ranks if rank not in cleared)


def _shares(wrong_from: Mapping[int, Sequence[int]], senders: int) -> tuple[dict[int, float], dict[int, float]]:
    """Which share of the others hears a sender wrong, and of which share of the others a receiver hears wrong."""
    heard = Counter(sender for wrong in wrong_from.values() for sender in wrong)
    rows = {sender: heard[sender] / max(1, len(wrong_from) - 1) for sender in range(senders)}
    columns = {
        rank: len(wrong) / max(1, senders - (1 if rank < senders else 0)) for rank, wrong in sorted(wrong_from.items())
    }
    return rows, columns


def _link(rows: Mapping[int, float], columns: Mapping[int, float]) -> Guilt:
    """One sender that nobody hears right, and one receiver that hears nobody right: in a ring, neighbours.

    Broadcasts pass through other ranks, so that a bad cable spoils what others send as well.
    """
    senders = [rank for rank, share in rows.items() if share == 1.0]
    receivers = [rank for rank, share in columns.items() if share == 1.0]
    whole = [(sender, receiver) for sender in senders for receiver in receivers if sender != receiver]
    if len(whole) == 1:
        return Guilt("the sender, the receiver or the path between them corrupts what is sent here", links=tuple(whole))
    return Guilt("neither a single sender nor a single receiver explains the wrong values")
