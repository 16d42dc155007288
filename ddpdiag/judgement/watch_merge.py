"""Looks of several hosts at one training, as one.

Only looks at one silence are put together. A host looks at a silence once, and again after twice, four times ... the
patience, so that a look stands for the time from the begin of its silence until the next look at it was due: had the
silence gone on, there would be that look. Two looks are of one silence if each lies in the other's time. The newest
look decides which silence it is; a host that has no look at it is left out, and that is told.
"""

from collections.abc import Iterator, Sequence

from msgspec import structs

from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.errors import UsageError
from ddpdiag.model.watch import Stall

_MOST_HOSTS = 16
# A look takes up to 5 s, and clocks of hosts differ by a second or two.
_SLACK_SECONDS = 10.0


def merged(stalls: Sequence[Stall]) -> Stall:
    """The last look of each host at the newest silence, together; UsageError if two hosts both have a rank.

    A host is known by its name. Processes have numbers of their own on each, so GPUs are left out.
    """
    known = [stall for stall in stalls if not stall.guessed] or stalls
    newest = max(known, key=lambda stall: stall.unix_seconds)
    joined = _joined([stall for stall in known if _of_one(newest, stall)]) if not newest.guessed else [newest]
    notes = (*dict.fromkeys(note for stall in joined for note in stall.notes), *_left_out(stalls, joined))
    if len(joined) == 1:
        return structs.replace(newest, notes=notes)
    hosts = {stall.host for stall in joined}
    first = min(joined, key=lambda stall: stall.silent_seconds)
    return structs.replace(
        first,
        host=f"{len(hosts)} hosts" if len(hosts) > 1 else first.host,
        ranks=tuple(sorted((seen for stall in joined for seen in stall.ranks), key=lambda seen: seen.rank)),
        gpus=(),
        gpus_unseen="",
        notes=(*notes, *_places(joined)) if len(hosts) > 1 else notes,
    )


def _of_one(one: Stall, other: Stall) -> bool:
    """May both be looks at the same silence?"""
    return _stands_for(one, other.unix_seconds) and _stands_for(other, one.unix_seconds)


def _stands_for(stall: Stall, unix_seconds: float) -> bool:
    begin = stall.unix_seconds - stall.silent_seconds
    due = begin + max(2 * stall.silent_seconds, stall.stall_seconds)
    return begin - _SLACK_SECONDS <= unix_seconds <= due + _SLACK_SECONDS


def _joined(stalls: Sequence[Stall]) -> list[Stall]:
    """The newest look at each rank; a host may have several watches, which see different ranks."""
    owners: dict[int, str] = {}
    joined: list[Stall] = []
    for stall in sorted(stalls, key=lambda stall: stall.unix_seconds, reverse=True):
        taken = {seen.rank: owners[seen.rank] for seen in stall.ranks if seen.rank in owners}
        strange = next((rank for rank, host in taken.items() if host != stall.host), None)
        if strange is not None:
            hosts = " and on ".join(sorted((taken[strange], stall.host)))
            raise UsageError(f"rank {strange} was on {hosts}: give the files of one training")
        if not taken and (stall.ranks or all(own.host != stall.host for own in joined)):
            joined.append(stall)
            owners |= {seen.rank: stall.host for seen in stall.ranks}
    return joined


def _left_out(stalls: Sequence[Stall], joined: Sequence[Stall]) -> Iterator[str]:
    """Hosts of which no look was taken, and why."""
    last = {stall.host: stall for stall in sorted(stalls, key=lambda stall: (not stall.guessed, stall.unix_seconds))}
    out = [stall for host, stall in last.items() if all(own.host != host for own in joined)]
    if nameless := [stall.host for stall in out if stall.guessed]:
        yield f"Left out: {names_text(nameless)}, where nothing names the ranks."
    by_age: dict[str, list[str]] = {}
    for stall in out:
        if not stall.guessed:
            by_age.setdefault(f"{joined[0].unix_seconds - stall.unix_seconds:.0f}", []).append(stall.host)
    for age, hosts in by_age.items():
        which = f"{names_text(hosts)}, which looked {age} s before"
        yield f"Left out: {which}: at another silence, or by a clock that is off."


def _places(stalls: Sequence[Stall]) -> Iterator[str]:
    """Which ranks each host has."""
    ordered = sorted((stall for stall in stalls if stall.ranks), key=lambda stall: stall.ranks[0].rank)
    told = [f"{ranks_text([seen.rank for seen in stall.ranks])} on {stall.host}" for stall in ordered]
    more = f" and {len(told) - _MOST_HOSTS} more hosts" if len(told) > _MOST_HOSTS else ""
    yield f"{'; '.join(told[:_MOST_HOSTS])}{more}."
