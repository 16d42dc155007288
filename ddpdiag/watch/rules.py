"""The rules that name ranks, from one look at a silent training; each returns None where it does not apply.

In this order: ranks that have ended, are stopped or stuck in the kernel; that get no data; that posted another
collective, or fewer; for which the others wait in a collective; that are elsewhere in the code than most.
"""

from collections.abc import Callable
from shlex import quote

from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.posted import in_words, lag, split
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import begun
from ddpdiag.watch.model import (
    Activity,
    Judged,
    Look,
    RankSeen,
    Stall,
    agree,
    doing_text,
    is_busy,
    is_idle,
    is_launching,
    place_of,
    subject,
)
from ddpdiag.watch.processes import is_remote

Rule = Callable[[Look], Judged | None]

# A waiting kernel of NCCL shows as 100 %.
_BUSY_GPU, _IDLE_GPU = 0.9, 0.05
# Of a core, between two looks at a rank that does the same.
_SAME_CORES = 0.2
_ELSEWHERE_FIX = "Look at its stack: the other ranks only wait for it."
PATHS_FIX = (
    "Look for what differs between the ranks: data, shapes, a branch taken on some ranks only. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective before it runs."
)
_HELPER_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is stuck in the kernel", "Z": "is dead"}


def _gone(look: Look) -> Judged | None:
    ranks = look.ranks(Activity.GONE)
    if not ranks or (len(ranks) < len(look.activities) and not look.ranks(Activity.WAITING)):
        return None
    who = ranks_text(ranks)
    return Judged(
        named=ranks,
        title=f"{who} {agree(ranks, 'has', 'have')} ended, and the command still runs",
        message=f"The process of {who} has ended; the launcher has not noticed, or waits for something else."
        + look.others_waiting(ranks),
        fix="Look at its last output, and at the kernel log of the host (out of memory, segfault).",
    )


def _last_to_end(look: Look) -> Judged | None:
    """Some have ended, and no rank is known to wait for them: mostly rank 0 saves the model."""
    ended = look.ranks(Activity.GONE)
    left = tuple(sorted(rank for rank in look.activities if rank not in ended))
    if not ended or not left:
        return None
    return Judged(
        title=f"{subject(ended, 'has', 'have')} ended, but not {ranks_text(left)}{look.place_text(left)}",
        message="No rank is known to wait for another one; "
        f"{subject(left, 'has', 'have')} not ended{look.where_text(left)}.",
        fix="Check what it does there: it may be the last save.",
        moving=True,
    )


def _stopped(look: Look) -> Judged | None:
    ranks = look.ranks(Activity.STOPPED)
    if not ranks:
        return None
    pids = ", ".join(str(look.seen(rank).pid) for rank in ranks)
    return Judged(
        named=ranks,
        title=f"{subject(ranks, 'is', 'are')} stopped",
        message=f"pid {pids} {agree(ranks, 'is', 'are')} in state T, after SIGSTOP or in a debugger."
        + look.others_waiting(ranks),
        fix=f"Find out what stopped it (a debugger, a job suspend); `kill -CONT {pids.replace(',', '')}` continues it.",
    )


def _blocked(look: Look) -> Judged | None:
    if look.stall.blocked_seconds < look.stall.stall_seconds:
        return None
    return Judged(
        title="the output of the command is not read",
        message=f"The program behind the pipe has read no output for {look.stall.blocked_seconds:.0f} s, so the ranks "
        "wait until they can print.",
        fix="Look at the program that reads the output (a pager, a full disk), or write the output to a file.",
    )


def _stuck(look: Look) -> Judged | None:
    ranks = look.ranks(Activity.STUCK)
    if not ranks:
        return None
    places = {p.wchan for rank in ranks if (p := look.seen(rank).process) is not None and p.wchan}
    where = f", in {', '.join(sorted(places))}" if places else ""
    return Judged(
        named=ranks,
        title=f"{subject(ranks, 'is', 'are')} stuck in the kernel",
        message=f"State D{where}: a file system, a disk or a driver does not respond." + look.others_waiting(ranks),
        fix="Look at the kernel log of the host (NFS server not responding, NVRM: Xid), and at its mounts.",
    )


def _starved(look: Look) -> Judged | None:
    """Ranks that wait for data from a worker that is stopped, stuck or dead."""
    loading = look.ranks(Activity.LOADING)
    helpers = {rank: [one for one in look.seen(rank).helpers if one.state in _HELPER_STATES] for rank in loading}
    ranks = tuple(rank for rank in loading if helpers[rank])
    if not ranks:
        return None
    helper = helpers[ranks[0]][0]
    where = f" in {helper.wchan}" if helper.wchan and helper.state == "D" else ""
    return Judged(
        named=ranks,
        title=f"{subject(ranks, 'waits', 'wait')} for data that does not arrive",
        message=f"A process that loads data for rank {ranks[0]} (pid {helper.pid}, {helper.name}) "
        f"{_HELPER_STATES[helper.state or '']}{where}." + look.others_waiting(ranks),
        fix=f"Find out what stopped it; `kill -CONT {helper.pid}` continues it."
        if helper.state in ("T", "t")
        else "Look at that process first: /dev/shm full, out of memory, a file system that does not respond.",
    )


def _posted(look: Look) -> Judged | None:
    """Ranks that posted another collective than most, or fewer."""
    traces = {seen.rank: seen.collectives for seen in look.stall.ranks if seen.collectives is not None}
    if found := split(traces):
        sides = "; ".join(f"{ranks_text(ranks)} posted {in_words(example)}" for example, ranks in found.sides[:4])
        return Judged(
            named=found.odd,
            title=f"{ranks_text(found.odd) if found.odd else 'ranks'} posted a different collective than the others"
            if found.odd
            else "the ranks posted different collectives",
            message=f"Under the same number, {sides}.",
            fix=PATHS_FIX,
        )
    behind = lag(traces)
    ranks = tuple(rank for rank in behind.ranks if look.activities[rank] is not Activity.WAITING)
    if not ranks or behind.lacking is None:
        return None
    return Judged(
        named=ranks,
        title=f"the others wait for {ranks_text(ranks)} in {in_words(behind.lacking)}",
        message=f"{begun(ranks_text(ranks))} did not post it{look.where_text(ranks)}.",
        fix=_ELSEWHERE_FIX,
    )


def _in_time(look: Look) -> Judged | None:
    """Ranks that wrote no recorder where a collective of others timed out: they posted nothing that is overdue."""
    overdue = [seen.rank for seen in look.stall.ranks if seen.collectives]
    ranks = tuple(seen.rank for seen in look.stall.ranks if seen.collectives is None and seen.process is not None)
    if not look.stall.timed_out or not overdue or not ranks:
        return None
    return Judged(
        named=ranks,
        title=f"{ranks_text(overdue)} waited for {ranks_text(ranks)} until the time-out",
        message=f"{begun(look.waiting_text(overdue))}; no collective of {ranks_text(ranks)} is overdue"
        f"{look.where_text(ranks)}.",
        fix=_ELSEWHERE_FIX,
    )


def _awaited(look: Look) -> Judged | None:
    """Ranks that are elsewhere while others wait in a collective."""
    waiting, away = look.ranks(Activity.WAITING), look.ranks(Activity.ELSEWHERE, Activity.LOADING)
    if not waiting or not away:
        return None
    return Judged(
        named=away,
        title=f"{subject(waiting, 'waits', 'wait')} for {ranks_text(away)}{look.place_text(away)}",
        message=f"{begun(look.waiting_text(waiting))}; {subject(away, 'is', 'are')} not in it{look.where_text(away)}.",
        fix=_ELSEWHERE_FIX,
    )


def _unseen(look: Look) -> Judged | None:
    """Ranks without a stack that use a core, where all others sleep, as ranks do that wait over gloo."""
    # Where a rank may wait on GPUs, one that uses a core may be one that waits.
    hidden = any(seen.holds_gpu is None and seen.process is not None for seen in look.stall.ranks)
    if any(seen.holds_gpu for seen in look.stall.ranks) or (hidden and bool(look.stall.gpus or look.stall.gpus_unseen)):
        return None
    busy = tuple(rank for rank in look.ranks(Activity.UNSEEN) if is_busy(look.seen(rank)))
    rest = [seen for seen in look.stall.ranks if seen.rank not in busy]
    if not busy or not rest or not all(map(is_idle, rest)):
        return None
    others = [seen.rank for seen in rest]
    waiting = look.ranks(Activity.WAITING)
    doing = f"waits in {look.calls_text(waiting)}" if len(waiting) == len(rest) == 1 else "sleeps"
    return Judged(
        named=busy,
        title=f"only {subject(busy, 'runs', 'run')}, {subject(others, doing, 'sleep')}",
        message=f"{begun(subject(busy, 'uses', 'use'))} a core; {subject(others, 'uses', 'use')} none, like "
        f"ranks that wait for another one over gloo. No stack of {ranks_text(busy)} can be read.",
        fix="Make its stack readable (a note shows how), and request a new look with SIGUSR1.",
    )


def _idle_gpus(look: Look) -> Judged | None:
    """Ranks whose GPU idles, where those of all others are busy, as they are in a kernel of NCCL that waits."""
    busy_shares = {pid: use.busy_share for use in look.stall.gpus for pid in use.pids}
    shares = {rank: busy_shares.get(look.seen(rank).pid) for rank in look.ranks(Activity.OPEN)}
    idle = tuple(rank for rank, share in shares.items() if share is not None and share <= _IDLE_GPU)
    busy = tuple(rank for rank, share in shares.items() if share is not None and share >= _BUSY_GPU)
    if not idle or not busy or len(idle) + len(busy) != len(look.stall.ranks):
        return None
    return Judged(
        named=idle,
        title=f"the GPU of {ranks_text(idle)} is idle, while the others are busy",
        message=f"The GPUs of {ranks_text(busy)} are busy, as in an NCCL kernel that waits for another rank; "
        f"{ranks_text(idle)} launched no kernel{look.where_text(idle)}.",
        fix=_ELSEWHERE_FIX,
    )


def _odd(look: Look) -> Judged | None:
    """Ranks that are elsewhere in the code than most, where no rank is known to wait."""
    known = [look.seen(rank) for rank in look.ranks(Activity.ELSEWHERE, Activity.OPEN, Activity.LOADING)]
    places = {seen.rank: place_of(seen.process) for seen in known if seen.process is not None}
    found = odd_ones_out(places) if len(known) == len(look.stall.ranks) else None
    if found is None or not found.ranks:
        return None
    rest = tuple(rank for rank in places if rank not in found.ranks)
    return Judged(
        named=found.ranks,
        title=f"{subject(found.ranks, 'is', 'are')} elsewhere in the code than the others",
        message=f"{begun(subject(rest, 'is', 'are'))} in {found.usual}), "
        f"{subject(found.ranks, 'is', 'are')} not{look.where_text(found.ranks)}.",
        fix=_ELSEWHERE_FIX,
    )


def _alone(look: Look) -> Judged | None:
    if len(look.stall.ranks) != 1 or (look.stall.world_size or 1) > 1:
        return None
    seen = look.stall.ranks[0]
    launcher = look.stall.remote_launcher or (look.stall.command if is_remote(look.stall.command) else "")
    if look.stall.guessed and launcher:
        return Judged(
            title="no rank was found on this host",
            message=f"{launcher} started the ranks on other hosts, or not as its own children.",
            fix=f"Start `ddpdiag watch` on each host: `{quote(launcher)} ddpdiag watch -- COMMAND`.",
        )
    if is_launching(seen):
        return Judged(
            title="the launcher waits for other hosts",
            message="torchrun has started no rank here: it waits until as many hosts as given by --nnodes have joined.",
            fix="Check whether the command runs on all hosts, with the same --rdzv-endpoint and --rdzv-id.",
        )
    return Judged(
        named=(seen.rank,),
        title=f"the only process of the training {f'is {state_text(seen.process)}' if seen.process else 'has ended'}",
        message=f"It is {doing_text(seen)}.",
        fix="Look at its stack." if seen.process and seen.process.stack else "",
    )


def is_without_rank_0(stall: Stall) -> bool:
    """Do other hosts have ranks, rank 0 among them, and no flight recorder shows collectives?

    A healthy training shows here as a hang does: some ranks wait in a collective, others are on their way to it. Only
    what is in the same place at two looks is believed.
    """
    elsewhere = stall.world_size is not None and stall.world_size > len(stall.ranks)
    known = any(seen.posted_seconds is not None for seen in stall.ranks)
    return bool(stall.ranks) and elsewhere and not known and all(seen.rank != 0 for seen in stall.ranks)


def is_unmoved(before: Stall | None, now: Stall) -> bool:
    """Was every rank in the same place at an earlier look at the same silence, and used its core alike?"""
    if before is None or before.number != now.number or len(before.ranks) != len(now.ranks):
        return False
    return all(map(_same_place, before.ranks, now.ranks))


def _same_place(before: RankSeen, now: RankSeen) -> bool:
    if (before.rank, before.pid) != (now.rank, now.pid) or before.process is None or now.process is None:
        return False
    if before.core_share is None or now.core_share is None:
        return False
    place = bool(now.process.stack) and before.process.stack == now.process.stack
    return place and abs(before.core_share - now.core_share) <= _SAME_CORES


def _apart(look: Look) -> Judged | None:
    """No rank is named where the training may continue, with rank 0, on another host."""
    if not is_without_rank_0(look.stall) or look.stall.unmoved:
        return None
    return Judged(
        title="no output on this host, and nothing shows whether the training continues",
        message="Rank 0, mostly the only rank that prints, runs on another host. The ranks here may do the same in a "
        "healthy training; the next look shows whether they are still at the same place.",
        fix="Look at the output and the report of rank 0's host. --output FILE or --flight-recorder shows "
        "progress here.",
    )


RULES: tuple[Rule, ...] = (
    _gone,
    _stopped,
    _blocked,
    _stuck,
    _starved,
    _last_to_end,
    _posted,
    _in_time,
    _alone,
    _apart,
    _awaited,
    _unseen,
    _idle_gpus,
    _odd,
)
