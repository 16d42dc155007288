"""The model of what a rank posted to its process groups, as a flight recorder shows it."""

import math
from collections.abc import Mapping

from msgspec import Struct


class Operation(Struct, frozen=True, kw_only=True, gc=False):
    """A collective or point-to-point operation that a rank posted.

    `group` is the group's name, and `number` counts the group's collectives from 1. `name` is, say, "all_reduce".
    `peer` is the rank at the other end of a "send" or "recv" (None: a collective, or not known). `is_open` says that no
    end of the operation is recorded.
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
    """A process group: its description in the script, and its ranks (empty if they are not recorded)."""

    description: str = ""
    ranks: tuple[int, ...] = ()


class Witness(Struct, frozen=True, kw_only=True):
    """The operations that one rank posted to its process groups, as its dump shows.

    `operations` are the last operations of each group, the oldest first. `posted` is, by group name, the number of the
    last collective that the rank posted. `groups` are the rank's groups by name. `knows_ends` says that the recorder
    records the ends of operations: NCCL's recorder does, gloo's does not.
    """

    rank: int
    operations: tuple[Operation, ...]
    posted: Mapping[str, int]
    groups: Mapping[str, Group]
    knows_ends: bool
