"""Measurements over the process groups of a training job: `ddpdiag.preflight(groups=...)`."""

from collections.abc import Sequence
from zlib import crc32

from msgspec import Struct

GroupKey = tuple[int, int]


def group_key(ranks: Sequence[int]) -> GroupKey:
    """The number of ranks in a group, and a checksum of them. It is short also in a group of thousands of ranks."""
    return len(ranks), crc32(",".join(map(str, ranks)).encode())


NO_GROUP = group_key(())


class GroupArrival(Struct, frozen=True):
    """A rank that reached a check. `groups` are the keys of its groups by name; NO_GROUP if it is in no such group."""

    host: str
    groups: dict[str, GroupKey]
    sizes: dict[str, int]


class GroupTimes(Struct, frozen=True, kw_only=True):
    """The measurements of one rank in one group: an all-reduce, and a message from `source`, the rank before it.

    Both have `size_bytes`. The `wrong` numbers count elements that differ from the known result.
    """

    name: str
    group_size: int
    size_bytes: int
    source: int
    all_reduce_seconds: float
    receive_seconds: float
    wrong_sums: int = 0
    wrong_received: int = 0


class GroupRecord(Struct, frozen=True, kw_only=True):
    """All that one rank measured in one check.

    `product_seconds` is the time of a matrix product on the `device`, a type of torch. On "cpu", `core_seconds` is the
    shortest time in which the rank had a core for one, and `cores` are those that it may use. If the measurement ended
    early, `stopped_at` is the operation, `stopped_in` its group (empty: none), and `error` the text of torch;
    `timed_out`: at the deadline.
    """

    device: str = "cpu"
    product_seconds: float = 0.0
    core_seconds: float = 0.0
    cores: tuple[int, ...] = ()
    groups: tuple[GroupTimes, ...] = ()
    stopped_at: str = ""
    stopped_in: str = ""
    error: str = ""
    timed_out: bool = False


class GroupCheck(Struct, frozen=True, kw_only=True):
    """All that is known of one check: the ranks that reached it, and the measurements of each round by rank.

    `first` are the measurements of the job's first check. `hosts` has every rank that ever reached a check.
    """

    world_size: int
    join_seconds: float
    budget_seconds: float
    arrivals: dict[int, GroupArrival]
    hosts: dict[int, str]
    rounds: tuple[dict[int, GroupRecord], ...] = ()
    first: dict[int, GroupRecord] = {}
