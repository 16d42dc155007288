"""Were hosts reached at the address that they offered? From what RDZ004 saw; for RDZ003."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.rendezvous.mesh import check as mesh


class Offers(Struct, frozen=True):
    """The address that each rank offered, None if it had none, and which of the others got there.

    Who reached a rank at another address only did not get there; who did not reach it at all says nothing.
    """

    addresses: Mapping[int, str | None]
    got_there: Mapping[int, Mapping[int, bool]]

    def reached(self, ranks: Sequence[int], address: str | None) -> bool | None:
        """Did the other hosts reach the host of these ranks there? None: not tried, or some did and some did not."""
        rank = next((rank for rank in ranks if rank in self.addresses), None)
        if rank is None or self.addresses[rank] != address:
            return None
        answers = set(self.got_there.get(rank, {}).values())
        return answers.pop() if len(answers) == 1 else None


def offers(met: Seen[mesh.Data]) -> Offers:
    """All tries of a run; of a way that was tried twice the better one counts."""
    addresses = {rank: data.offered for rank, data in met.by_rank.items()}
    got_there: dict[int, dict[int, bool]] = {}
    for row in met.rows:
        for cell in row.data.cells:
            if cell.connect_seconds is not None:
                others = got_there.setdefault(cell.peer, {})
                got = cell.missed is None and cell.address == addresses.get(cell.peer)
                others[row.place.rank] = got or others.get(row.place.rank, False)
    return Offers(addresses, got_there)
