"""What is wrong with a rank's own process: dead, stopped, stuck in the kernel, without its data.

Each rule gives who it names, or None where it does not apply.
"""

from collections.abc import Callable, Sequence

from ddpdiag.checks.hosts import ranks_text
from ddpdiag.judgement.standing import Stand
from ddpdiag.judgement.watch_words import Stands, agree, for_whom, rank_seen, those, where_text, which_is
from ddpdiag.model.watch import Helper, Judged, RankSeen, Stall

Rule = Callable[[Stall, Stands], Judged | None]

_HELPER_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is stuck in the kernel", "Z": "is dead"}


def _gone(stall: Stall, stands: Stands) -> Judged | None:
    ranks = those(stands, Stand.GONE)
    if not ranks or (len(ranks) < len(stands) and not those(stands, Stand.WAITING)):
        return None
    who = ranks_text(ranks)
    return Judged(
        named=ranks,
        title=f"{who} {agree(ranks, 'has', 'have')} ended, and the command goes on",
        message=f"The process of {who} is gone, or dead: the launcher has not noticed, or waits for something else."
        + for_whom(stall, stands, ranks),
        remedy="Look at what it wrote last, and at the kernel log of the host (out of memory, segfault).",
    )


def _last_to_end(stall: Stall, stands: Stands) -> Judged | None:
    """Some have ended, and nobody is known to wait for them: mostly rank 0 saves what was trained."""
    ended = those(stands, Stand.GONE)
    left = tuple(sorted(rank for rank in stands if rank not in ended))
    if not ended or not left:
        return None
    return Judged(
        named=(),
        title=f"{ranks_text(ended)} {agree(ended, 'has', 'have')} ended; "
        f"{ranks_text(left)} {agree(left, 'goes', 'go')} on{which_is(stall, left)}",
        message=f"No rank is known to wait for another one{where_text(stall, left)}.",
        remedy="Look at what it does there, which may be its last save.",
        moving=True,
    )


def _stopped(stall: Stall, stands: Stands) -> Judged | None:
    ranks = those(stands, Stand.STOPPED)
    if not ranks:
        return None
    pids = ", ".join(str(rank_seen(stall, rank).pid) for rank in ranks)
    return Judged(
        named=ranks,
        title=f"{ranks_text(ranks)} {agree(ranks, 'is', 'are')} stopped",
        message=f"pid {pids} {agree(ranks, 'is', 'are')} in state T: somebody sent SIGSTOP, or holds it in a debugger."
        + for_whom(stall, stands, ranks),
        remedy="Find out who stopped it (a debugger, a job suspend); "
        f"`kill -CONT {pids.replace(',', '')}` lets it go on.",
    )


def _blocked(stall: Stall, stands: Stands) -> Judged | None:
    if stall.blocked_seconds < stall.stall_seconds:
        return None
    return Judged(
        named=(),
        title="nobody reads the output of the command",
        message=f"What the ranks print has not been taken for {stall.blocked_seconds:.0f} s by the program behind the "
        "pipe, so that they wait until they can print.",
        remedy="Look at what the output is piped into (a pager, a full disk), or write it to a file.",
    )


def _stuck(stall: Stall, stands: Stands) -> Judged | None:
    ranks = those(stands, Stand.STUCK)
    if not ranks:
        return None
    places = {p.wchan for rank in ranks if (p := rank_seen(stall, rank).process) is not None and p.wchan}
    where = f", in {', '.join(sorted(places))}" if places else ""
    return Judged(
        named=ranks,
        title=f"{ranks_text(ranks)} {agree(ranks, 'is', 'are')} stuck in the kernel",
        message=f"State D{where}: a file system, a disk or a driver does not answer." + for_whom(stall, stands, ranks),
        remedy="Look at the kernel log of the host (NFS server not responding, NVRM: Xid), and at its mounts.",
    )


def _starved(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks that wait for data of which the worker is stopped, stuck or dead."""
    loading = those(stands, Stand.LOADING)
    sick = {rank: own for rank in loading if (own := _sick_helpers(rank_seen(stall, rank)))}
    if not sick:
        return None
    ranks = tuple(sick)
    helper = sick[ranks[0]][0]
    where = f" in {helper.wchan}" if helper.wchan and helper.state == "D" else ""
    return Judged(
        named=ranks,
        title=f"{ranks_text(ranks)} {agree(ranks, 'waits', 'wait')} for data that does not come",
        message=f"A process that loads data for rank {ranks[0]} (pid {helper.pid}, {helper.name}) "
        f"{_HELPER_STATES[helper.state or '']}{where}." + for_whom(stall, stands, ranks),
        remedy=f"Find out who stopped it; `kill -CONT {helper.pid}` lets it go on."
        if helper.state in ("T", "t")
        else "Look at that process first: /dev/shm full, out of memory, a file system that does not answer.",
    )


def _sick_helpers(seen: RankSeen) -> Sequence[Helper]:
    return [helper for helper in seen.helpers if helper.state in _HELPER_STATES]


FAULTS: tuple[Rule, ...] = (_gone, _stopped, _blocked, _stuck, _starved, _last_to_end)
