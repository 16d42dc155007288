"""The model of what a rank posted to its process groups, whoever recorded it."""

import math
from collections.abc import Mapping

from msgspec import Struct


class Operation(Struct, frozen=True, kw_only=True, gc=False):
    """A collective or point-to-point operation that a rank posted.

    `group` is the group's name, and `number` counts the group's collectives from 1. `name` is such as "all_reduce".
    `peer` is the rank at the other end of a "send" or "recv", None for a collective. `is_open`: it is not known to be
    over.
    """

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    peer: int | None = None
    is_open: bool = True

    @property
    def is_p2p(self) -> bool:
        return self.name in ("send", "recv")

    @property
    def elements(self) -> int:
        """The number of elements of all inputs."""
        return sum(map(math.prod, self.sizes))


class Group(Struct, frozen=True, kw_only=True):
    """A process group: its description in the script, and its ranks (empty: the recorder does not know them)."""

    description: str = ""
    ranks: tuple[int, ...] = ()


class Witness(Struct, frozen=True, kw_only=True):
    """The record of one rank.

    `operations` are the last ones of each group, the oldest first. `posted` is the number of the last collective of
    each group. `groups` has the groups of the rank by their names. `knows_ends`: the recorder notes which operations
    are over, as that of NCCL does; the one of gloo does not.
    """

    rank: int
    operations: tuple[Operation, ...]
    posted: Mapping[str, int]
    groups: Mapping[str, Group]
    knows_ends: bool
