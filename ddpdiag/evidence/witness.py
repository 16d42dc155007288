"""The model of what a rank posted to its process groups, as its flight recorder shows it."""

from collections.abc import Mapping

from msgspec import Struct

from ddpdiag.model import Collective


class Group(Struct, frozen=True, kw_only=True):
    """A process group: its description in the script, and its ranks (empty if they are not recorded)."""

    description: str = ""
    ranks: tuple[int, ...] = ()


class Witness(Struct, frozen=True, kw_only=True):
    """The operations that one rank posted to its process groups.

    `operations` are the last operations of each group, the oldest first. `posted` is, by group name, the number of the
    last collective that the rank posted. `groups` are the rank's groups by name. `knows_ends` says that the recorder
    records the ends of operations: NCCL's recorder does, gloo's does not. `newest_unix_seconds` is the time at which
    the newest operation was posted (None: no operation).
    """

    rank: int
    operations: tuple[Collective, ...]
    posted: Mapping[str, int]
    groups: Mapping[str, Group]
    knows_ends: bool
    newest_unix_seconds: float | None = None
