"""Who holds a silent training up, from what was seen of the ranks of one host. Pure.

In this order: who is gone, stopped or stuck in the kernel; whose data does not come; who posted another collective, or
fewer; for whom the others wait in a collective; who stands elsewhere than most. Where all wait alike, nobody on this
host is named: the one that is missing runs on another one, or a message was lost.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from ddpdiag.checks.bundle import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.flights import in_words, lag, last, split
from ddpdiag.judgement.standing import Stand, call_of, is_busy, is_idle, is_launching, is_starting, place_of, stand
from ddpdiag.model.watch import Helper, Judged, RankSeen, Stall, Standing
from ddpdiag.stats import odd_ones_out

Stands = Mapping[int, Stand]

_ELSEWHERE_REMEDY = "Look at what it does there, the stack is below: the other ranks only wait for it."
_PATHS_REMEDY = (
    "Look for what differs between the ranks: data, shapes, a branch taken on some ranks only. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective before it runs."
)
_MOST_STACKS = 4
_HELPER_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is stuck in the kernel", "Z": "is dead"}


def is_start(stall: Stall) -> bool:
    """Are ranks still importing, and nobody waits for anything but them?"""
    stands = {seen.rank: stand(seen) for seen in stall.ranks}
    at_work = {seen.rank for seen in stall.ranks if is_starting(seen)}
    return bool(at_work) and all(rank in at_work or own is Stand.WAITING for rank, own in stands.items())


def judged(stall: Stall) -> Judged:
    """What the look means, and who stands where."""
    stands = {seen.rank: stand(seen) for seen in stall.ranks}
    verdict = next((v for rule in _RULES if (v := rule(stall, stands)) is not None), None) or _nobody(stall, stands)
    return structs.replace(
        verdict, standings=_standings(stall, verdict.named), stacks=_stacks(stall, verdict.named), notes=_notes(stall)
    )


def _of(stands: Stands, *kinds: Stand) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, own in stands.items() if own in kinds))


def _seen(stall: Stall, rank: int) -> RankSeen:
    return next(seen for seen in stall.ranks if seen.rank == rank)


def _are(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _gone(stall: Stall, stands: Stands) -> Judged | None:
    ranks = _of(stands, Stand.GONE)
    if not ranks:
        return None
    who = ranks_text(ranks)
    return Judged(
        named=ranks,
        title=f"{who} {_are(ranks, 'is', 'are')} dead",
        message=f"The process of {who} has ended, and its launcher has not noticed, or not ended the others yet.",
        remedy="Look at what it wrote last, and at the kernel log of the host (out of memory, segfault).",
    )


def _stopped(stall: Stall, stands: Stands) -> Judged | None:
    ranks = _of(stands, Stand.STOPPED)
    if not ranks:
        return None
    pids = ", ".join(str(_seen(stall, rank).pid) for rank in ranks)
    return Judged(
        named=ranks,
        title=f"{ranks_text(ranks)} {_are(ranks, 'is', 'are')} stopped",
        message=f"pid {pids} {_are(ranks, 'is', 'are')} in state T: somebody sent SIGSTOP, or holds it in a debugger."
        + _for_whom(stall, stands, ranks),
        remedy=f"Find out who stopped it (a debugger, a job suspend); `kill -CONT {pids.replace(',', '')}` lets it go on.",
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
    ranks = _of(stands, Stand.STUCK)
    if not ranks:
        return None
    places = {p.wchan for rank in ranks if (p := _seen(stall, rank).process) is not None and p.wchan}
    where = f", in {', '.join(sorted(places))}" if places else ""
    return Judged(
        named=ranks,
        title=f"{ranks_text(ranks)} {_are(ranks, 'is', 'are')} stuck in the kernel",
        message=f"State D{where}: a file system, a disk or a driver does not answer." + _for_whom(stall, stands, ranks),
        remedy="Look at the kernel log of the host (NFS server not responding, NVRM: Xid), and at its mounts.",
    )


def _starved(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks that wait for data of which the worker is stopped, stuck or dead."""
    loading = _of(stands, Stand.LOADING)
    sick = {rank: own for rank in loading if (own := _sick_helpers(_seen(stall, rank)))}
    if not sick:
        return None
    ranks = tuple(sick)
    helper = sick[ranks[0]][0]
    where = f" in {helper.wchan}" if helper.wchan and helper.state == "D" else ""
    return Judged(
        named=ranks,
        title=f"{ranks_text(ranks)} {_are(ranks, 'waits', 'wait')} for data that does not come",
        message=f"A process that loads data for rank {ranks[0]} (pid {helper.pid}, {helper.name}) "
        f"{_HELPER_STATES[helper.state or '']}{where}." + _for_whom(stall, stands, ranks),
        remedy="Look at that process first: /dev/shm full, out of memory, a file system that does not answer.",
    )


def _sick_helpers(seen: RankSeen) -> Sequence[Helper]:
    return [helper for helper in seen.helpers if helper.state in _HELPER_STATES]


def _posted(stall: Stall, stands: Stands) -> Judged | None:
    """Who posted another collective than most, or fewer."""
    flights = {seen.rank: seen.flight for seen in stall.ranks if seen.flight is not None}
    if found := split(flights):
        sides = "; ".join(f"{ranks_text(ranks)} posted {in_words(example)}" for example, ranks in found.sides[:4])
        return Judged(
            named=found.odd,
            title=f"{ranks_text(found.odd) if found.odd else 'ranks'} posted another collective than the others"
            if found.odd
            else "the ranks posted different collectives",
            message=f"Under the same number {sides}.",
            remedy=_PATHS_REMEDY,
        )
    behind = lag(flights)
    ranks = tuple(rank for rank in behind.ranks if stands[rank] is not Stand.WAITING)
    if not ranks or behind.lacking is None:
        return None
    return Judged(
        named=ranks,
        title=f"the others wait for {ranks_text(ranks)} in {in_words(behind.lacking)}",
        message=f"{_begun(ranks_text(ranks))} did not post it{_where(stall, ranks)}.",
        remedy=_ELSEWHERE_REMEDY,
    )


def _awaited(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks that are elsewhere while others wait in a collective."""
    waiting, away = _of(stands, Stand.WAITING), _of(stands, Stand.ELSEWHERE, Stand.LOADING)
    if not waiting or not away:
        return None
    return Judged(
        named=away,
        title=f"{ranks_text(waiting)} {_are(waiting, 'waits', 'wait')} for {ranks_text(away)}{_which_is(stall, away)}",
        message=f"{_begun(ranks_text(waiting))} {_are(waiting, 'waits', 'wait')} in {_calls(stall, waiting)}; "
        f"{ranks_text(away)} {_are(away, 'is', 'are')} not there{_where(stall, away)}.",
        remedy=_ELSEWHERE_REMEDY,
    )


def _unseen(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks without a stack that use a core, where all others sleep, as those do that wait over gloo."""
    if any(seen.holds_gpu for seen in stall.ranks):
        return None
    busy = tuple(rank for rank in _of(stands, Stand.UNSEEN) if is_busy(_seen(stall, rank)))
    rest = [seen for seen in stall.ranks if seen.rank not in busy]
    if not busy or not rest or not all(map(is_idle, rest)):
        return None
    others = ranks_text([seen.rank for seen in rest])
    waiting = _of(stands, Stand.WAITING)
    doing = f"waits in {_calls(stall, waiting)}" if len(waiting) == len(rest) == 1 else "sleeps"
    return Judged(
        named=busy,
        title=f"only {ranks_text(busy)} {_are(busy, 'runs', 'run')}, {others} {_are(rest, doing, 'sleep')}",
        message=f"{_begun(ranks_text(busy))} uses {_cores(stall, busy)}, and {others} none, as ranks do that wait for "
        "another one over gloo. Its stack cannot be seen, so that nothing says where it is.",
        remedy="Let its stack be seen (below) and look again with SIGUSR1.",
    )


def _odd(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks that stand elsewhere in the code than most, where nobody is known to wait."""
    known = [seen for seen in stall.ranks if stands[seen.rank] in (Stand.ELSEWHERE, Stand.OPEN, Stand.LOADING)]
    places = {seen.rank: place_of(seen.process) for seen in known if seen.process is not None}
    found = odd_ones_out(places) if len(known) == len(stall.ranks) else None
    if found is None or not found.ranks:
        return None
    rest = tuple(rank for rank in places if rank not in found.ranks)
    return Judged(
        named=found.ranks,
        title=f"{ranks_text(found.ranks)} {_are(found.ranks, 'stands', 'stand')} elsewhere than the others",
        message=f"{_begun(ranks_text(rest))} {_are(rest, 'is', 'are')} in {found.usual}), "
        f"{ranks_text(found.ranks)} {_are(found.ranks, 'is', 'are')} not{_where(stall, found.ranks)}.",
        remedy=_ELSEWHERE_REMEDY,
    )


def _alone(stall: Stall, stands: Stands) -> Judged | None:
    if len(stall.ranks) != 1 or (stall.world_size or 1) > 1:
        return None
    seen = stall.ranks[0]
    if is_launching(seen):
        return Judged(
            named=(),
            title="the launcher waits for other hosts",
            message="torchrun has started no rank here: it waits until as many hosts as --nnodes says have come.",
            remedy="Look whether the command runs on all hosts, with the same --rdzv-endpoint and --rdzv-id.",
        )
    return Judged(
        named=(seen.rank,),
        title=f"the only process of the training is {state_text(seen.process)}" if seen.process else "it is gone",
        message=f"It is {_doing(seen)}.",
        remedy="Look at what it does there; the stack is below." if seen.process and seen.process.stack else "",
    )


_RULES: tuple[Callable[[Stall, Stands], Judged | None], ...] = (
    _gone,
    _stopped,
    _blocked,
    _stuck,
    _starved,
    _posted,
    _alone,
    _awaited,
    _unseen,
    _odd,
)


def _nobody(stall: Stall, stands: Stands) -> Judged:
    """Nothing tells the ranks apart."""
    if not stall.ranks:
        message = "No process of the command has a rank (RANK, SLURM_PROCID and such), and none of them is Python."
        return Judged(named=(), title="no rank was found", message=message, remedy="")
    waiting = _of(stands, Stand.WAITING)
    if len(waiting) == len(stall.ranks):
        return _all_wait(stall, waiting)
    who, loading = ranks_text(sorted(stands)), _of(stands, Stand.LOADING)
    if len(loading) == len(stall.ranks):
        return Judged(
            named=(),
            title=f"{who} wait for their data",
            message="Every rank waits for its data loader, and its workers are alive.",
            remedy="Look at where the data comes from: a file system, a download, memory; try num_workers=0.",
        )
    unseen = _of(stands, Stand.UNSEEN)
    if unseen:
        nothing = f"nothing says where {ranks_text(unseen)} {_are(unseen, 'stands', 'stand')}"
        waits = (
            f"{ranks_text(waiting)} {_are(waiting, 'waits', 'wait')} in {_calls(stall, waiting)}, and "
            if waiting
            else ""
        )
        message = "The stacks of these ranks cannot be seen, and their states and use of cores do not tell them apart."
        return Judged(named=(), title=waits + nothing, message=message, remedy="Let the stacks be seen (below).")
    return Judged(
        named=(),
        title="nothing tells the ranks apart",
        message="No rank of this host is known to wait for another one, and most do not stand in one place.",
        remedy="If the job is silent for so long when all is well, give a longer --stall.",
    )


def _all_wait(stall: Stall, waiting: Sequence[int]) -> Judged:
    processes = {seen.rank: seen.process for seen in stall.ranks if seen.process is not None}
    found = odd_ones_out({rank: call_of(process) for rank, process in processes.items()})
    if found is not None:
        parts = [f"{ranks_text(ranks)} in {call}" for call, ranks in found.groups.items()]
        named = found.ranks
        return Judged(
            named=named,
            title="the ranks wait in different collectives",
            message=f"{_begun('; '.join(parts))}: their paths through the code differ.",
            remedy=_PATHS_REMEDY,
        )
    what = _calls(stall, waiting)
    if stall.world_size is not None and stall.world_size > len(stall.ranks):
        return Judged(
            named=(),
            title=f"all ranks of this host wait in {what}",
            message=f"{_begun(ranks_text(waiting))} of {stall.world_size} wait there: for a rank of another host, or for "
            "a message that does not arrive.",
            remedy="Look at the reports of the other hosts: one names the rank that is not in this collective.",
        )
    return Judged(
        named=(),
        title=f"all ranks wait in {what}",
        message="Nobody is missing, and still it does not end: a message does not arrive, or was not sent.",
        remedy="Look at what the ranks share: network, firewall, interface, the ways between GPUs (`ddpdiag check`).",
    )


# Words ----------------------------------------------------------------------------------------------------------------


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def _for_whom(stall: Stall, stands: Stands, ranks: Sequence[int]) -> str:
    waiting = tuple(rank for rank in _of(stands, Stand.WAITING) if rank not in ranks)
    if not waiting:
        return ""
    return f" {_begun(ranks_text(waiting))} {_are(waiting, 'waits', 'wait')} in {_calls(stall, waiting)}."


def _calls(stall: Stall, ranks: Sequence[int]) -> str:
    """The collective in which they wait: from the flight recorder, else the name of the call."""
    seen = [_seen(stall, rank) for rank in ranks]
    ends = {in_words(end) for own in seen if (end := last(own.flight)) is not None}
    calls = dict.fromkeys(call_of(own.process) for own in seen if own.process is not None)
    return ", ".join(sorted(ends)) if ends else " and ".join(filter(None, calls)) or "a collective"


def _where(stall: Stall, ranks: Sequence[int]) -> str:
    doing = dict.fromkeys(_doing(_seen(stall, rank)) for rank in ranks)
    return f": {_are(ranks, 'it is', 'they are')} {'; '.join(list(doing)[:4])}"


def _which_is(stall: Stall, ranks: Sequence[int]) -> str:
    """Where a single one is, for a title."""
    process = _seen(stall, ranks[0]).process
    return f", which is in {process.stack[0]}" if len(ranks) == 1 and process is not None and process.stack else ""


def _doing(seen: RankSeen) -> str:
    """Such as "running at 100 % of a core, in spin (train.py:7)"."""
    process = seen.process
    if process is None:
        return "gone"
    use = f" with {seen.core_share:.1f} cores" if is_busy(seen) else ""
    gil = ", holding the GIL" if seen.holds_gil else ""
    return state_text(process) + use + gil + (f", in {process.stack[0]}" if process.stack else "")


def _cores(stall: Stall, ranks: Sequence[int]) -> str:
    shares = [share for rank in ranks if (share := _seen(stall, rank).core_share) is not None]
    return f"{min(shares):.1f} cores"


def _standings(stall: Stall, named: Sequence[int]) -> tuple[Standing, ...]:
    groups: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for seen in stall.ranks:
        groups[seen.rank not in named, _standing(seen)].append(seen.rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    return tuple(Standing(ranks=tuple(ranks), text=text) for (_, text), ranks in ordered)


def _standing(seen: RankSeen) -> str:
    """How one rank stands, without what differs between ranks that stand alike."""
    process = seen.process
    if process is None:
        return "gone"
    text = state_text(process) + (f" in {place_of(process)})" if process.stack else "")
    if not process.stack and process.wchan:
        text += f" in the kernel's {process.wchan}"
    if is_busy(seen):
        text += ", using a core"
    end = last(seen.flight)
    if end is not None:
        text += f"; last posted {in_words(end)}"
    elif seen.flight is not None:
        text += "; posted nothing"
    return text


def _stacks(stall: Stall, named: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Of some of the named, and of one of those that wait."""
    known = [(seen.rank, seen.process.stack) for seen in stall.ranks if seen.process and seen.process.stack]
    first = [row for row in known if row[0] in named][:_MOST_STACKS]
    others = [row for row in known if row[0] not in named][:1]
    return {f"rank {rank}": stack for rank, stack in (*first, *others)}


def _notes(stall: Stall) -> tuple[str, ...]:
    reasons: dict[str, list[int]] = defaultdict(list)
    for seen in stall.ranks:
        if seen.no_stack:
            reasons[seen.no_stack].append(seen.rank)
    stackless = [f"No stack of {ranks_text(ranks)}: {reason}." for reason, ranks in reasons.items()]
    guessed = "No variable names the ranks, so they are numbered in the order of their start."
    return (*stall.notes, *stackless, *([guessed] if stall.guessed and len(stall.ranks) > 1 else []))
