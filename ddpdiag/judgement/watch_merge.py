"""Looks of several hosts at one training, as one. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from ddpdiag.checks.hosts import ranks_text
from ddpdiag.errors import UsageError
from ddpdiag.model.watch import Stall

_MOST_HOSTS = 16


def merged(stalls: Sequence[Stall]) -> Stall:
    """The last look of each host, together; UsageError if two hosts both have a rank.

    A host is known by its name. Processes have numbers of their own on each, so GPUs are left out.
    """
    last: dict[str, Stall] = {}
    for stall in sorted(stalls, key=lambda stall: stall.unix_seconds):
        last[stall.host] = stall
    if len(last) == 1:
        return next(iter(last.values()))
    owners: dict[int, str] = {}
    for host, stall in last.items():
        for seen in stall.ranks:
            if seen.rank in owners:
                raise UsageError(
                    f"rank {seen.rank} was on {owners[seen.rank]} and on {host}: give the files of one training"
                )
            owners[seen.rank] = host
    first = min(last.values(), key=lambda stall: stall.silent_seconds)
    return structs.replace(
        first,
        host=f"{len(last)} hosts",
        ranks=tuple(sorted((seen for stall in last.values() for seen in stall.ranks), key=lambda seen: seen.rank)),
        gpus=(),
        gpus_unseen="",
        notes=(*dict.fromkeys(note for stall in last.values() for note in stall.notes), *_places(last.values())),
    )


def _places(stalls: Iterable[Stall]) -> Iterator[str]:
    """Which ranks each host has."""
    told = [f"{ranks_text([seen.rank for seen in stall.ranks])} on {stall.host}" for stall in stalls if stall.ranks]
    more = f" and {len(told) - _MOST_HOSTS} more hosts" if len(told) > _MOST_HOSTS else ""
    yield f"{'; '.join(told[:_MOST_HOSTS])}{more}."
