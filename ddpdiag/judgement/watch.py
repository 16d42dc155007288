"""Who holds a silent training up, from what was seen of the ranks of one host.

In this order: who is gone, stopped or stuck in the kernel; whose data does not come; who posted another collective, or
fewer; for whom the others wait in a collective; who stands elsewhere than most. Where all wait alike, nobody on this
host is named: the one that is missing runs on another one, or a message was lost.
"""

from collections.abc import Sequence

from msgspec import structs

from ddpdiag.checks.collective_traces import in_words, lag, split
from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.judgement.standing import Stand, call_of, is_busy, is_idle, is_launching, is_starting, place_of, stand
from ddpdiag.judgement.watch_apart import apart
from ddpdiag.judgement.watch_faults import FAULTS, Rule
from ddpdiag.judgement.watch_words import (
    Stands,
    agree,
    begun,
    calls_text,
    doing_text,
    notes,
    rank_seen,
    stacks,
    standings,
    those,
    where_text,
    which_is,
)
from ddpdiag.model.watch import Judged, Stall
from ddpdiag.probes.far import is_far
from ddpdiag.stats import odd_ones_out

# A waiting kernel of NCCL shows as 100 %.
_BUSY_GPU, _IDLE_GPU = 0.9, 0.05
_ELSEWHERE_REMEDY = "Look at what it does there, the stack is below: the other ranks only wait for it."
_PATHS_REMEDY = (
    "Look for what differs between the ranks: data, shapes, a branch taken on some ranks only. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective before it runs."
)


def is_start(stall: Stall) -> bool:
    """Are ranks still importing, and nobody waits for anything but them?"""
    stands = {seen.rank: stand(seen) for seen in stall.ranks}
    at_work = {seen.rank for seen in stall.ranks if is_starting(seen)}
    return bool(at_work) and all(rank in at_work or own is Stand.WAITING for rank, own in stands.items())


def progress_age(stall: Stall) -> float | None:
    """Seconds since any rank posted a collective, as far as flight recorders say."""
    return min((seen.posted_seconds for seen in stall.ranks if seen.posted_seconds is not None), default=None)


def judged(stall: Stall) -> Judged:
    """What the look means, and who stands where."""
    stands = {seen.rank: stand(seen) for seen in stall.ranks}
    verdict = next((v for rule in _RULES if (v := rule(stall, stands)) is not None), None) or _nobody(stall, stands)
    return structs.replace(
        verdict, standings=standings(stall, verdict.named), stacks=stacks(stall, verdict.named), notes=notes(stall)
    )


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
        message=f"{begun(ranks_text(ranks))} did not post it{where_text(stall, ranks)}.",
        remedy=_ELSEWHERE_REMEDY,
    )


def _awaited(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks that are elsewhere while others wait in a collective."""
    waiting, away = those(stands, Stand.WAITING), those(stands, Stand.ELSEWHERE, Stand.LOADING)
    if not waiting or not away:
        return None
    return Judged(
        named=away,
        title=f"{ranks_text(waiting)} {agree(waiting, 'waits', 'wait')} for {ranks_text(away)}{which_is(stall, away)}",
        message=f"{begun(ranks_text(waiting))} {agree(waiting, 'waits', 'wait')} in {calls_text(stall, waiting)}; "
        f"{ranks_text(away)} {agree(away, 'is', 'are')} not there{where_text(stall, away)}.",
        remedy=_ELSEWHERE_REMEDY,
    )


def _unseen(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks without a stack that use a core, where all others sleep, as those do that wait over gloo."""
    if _may_wait_on_gpus(stall):
        return None
    busy = tuple(rank for rank in those(stands, Stand.UNSEEN) if is_busy(rank_seen(stall, rank)))
    rest = [seen for seen in stall.ranks if seen.rank not in busy]
    if not busy or not rest or not all(map(is_idle, rest)):
        return None
    others = [seen.rank for seen in rest]
    waiting = those(stands, Stand.WAITING)
    doing = f"waits in {calls_text(stall, waiting)}" if len(waiting) == len(rest) == 1 else "sleeps"
    return Judged(
        named=busy,
        title=f"only {ranks_text(busy)} {agree(busy, 'runs', 'run')}, "
        f"{ranks_text(others)} {agree(others, doing, 'sleep')}",
        message=f"{begun(ranks_text(busy))} {agree(busy, 'uses', 'use')} a core, and {ranks_text(others)} none, as "
        "ranks do that wait for another one over gloo. Where it is cannot be seen.",
        remedy="Let its stack be seen (a note says how), and look again with SIGUSR1.",
    )


def _may_wait_on_gpus(stall: Stall) -> bool:
    """Then a rank that uses a core may be one that waits."""
    hidden = any(seen.holds_gpu is None and seen.process is not None for seen in stall.ranks)
    return any(seen.holds_gpu for seen in stall.ranks) or (hidden and bool(stall.gpus or stall.gpus_unseen))


def _idle_gpus(stall: Stall, stands: Stands) -> Judged | None:
    """Ranks whose GPU idles, where those of all others are busy, as they are in a kernel of NCCL that waits."""
    busy_shares = {pid: use.busy_share for use in stall.gpus for pid in use.pids}
    shares = {seen.rank: busy_shares.get(seen.pid) for seen in stall.ranks if stands[seen.rank] is Stand.OPEN}
    idle = tuple(rank for rank, share in shares.items() if share is not None and share <= _IDLE_GPU)
    busy = tuple(rank for rank, share in shares.items() if share is not None and share >= _BUSY_GPU)
    if not idle or not busy or len(idle) + len(busy) != len(stall.ranks):
        return None
    return Judged(
        named=idle,
        title=f"the GPU of {ranks_text(idle)} idles, while the others are busy",
        message=f"The GPUs of {ranks_text(busy)} are in use, as they are in a kernel of NCCL that waits for another "
        f"rank; {ranks_text(idle)} launched none{where_text(stall, idle)}.",
        remedy=_ELSEWHERE_REMEDY,
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
        title=f"{ranks_text(found.ranks)} {agree(found.ranks, 'stands', 'stand')} elsewhere than the others",
        message=f"{begun(ranks_text(rest))} {agree(rest, 'is', 'are')} in {found.usual}), "
        f"{ranks_text(found.ranks)} {agree(found.ranks, 'is', 'are')} not{where_text(stall, found.ranks)}.",
        remedy=_ELSEWHERE_REMEDY,
    )


def _alone(stall: Stall, stands: Stands) -> Judged | None:
    if len(stall.ranks) != 1 or (stall.world_size or 1) > 1:
        return None
    seen = stall.ranks[0]
    launcher = stall.far_launcher or (stall.command if is_far(stall.command) else "")
    if stall.guessed and launcher:
        return Judged(
            named=(),
            title="no rank was found on this host",
            message=f"{launcher} started the ranks elsewhere, or not as its own children.",
            remedy=f"Start us on each host: `{launcher} ddpdiag watch -- COMMAND`.",
        )
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
        message=f"It is {doing_text(seen)}.",
        remedy="Look at what it does there; the stack is below." if seen.process and seen.process.stack else "",
    )


_RULES: tuple[Rule, ...] = (
    *FAULTS,
    _posted,
    _alone,
    apart,
    _awaited,
    _unseen,
    _idle_gpus,
    _odd,
)


def _nobody(stall: Stall, stands: Stands) -> Judged:
    """Nothing tells the ranks apart."""
    if not stall.ranks:
        message = "No process of the command has a rank (RANK, SLURM_PROCID and such), and none of them is Python."
        return Judged(named=(), title="no rank was found", message=message, remedy="")
    waiting = those(stands, Stand.WAITING)
    if len(waiting) == len(stall.ranks):
        return _all_wait(stall, waiting)
    who, loading = ranks_text(sorted(stands)), those(stands, Stand.LOADING)
    if len(loading) == len(stall.ranks):
        return Judged(
            named=(),
            title=f"{who} wait for their data",
            message="Every rank waits for its data loader, and its workers are alive.",
            remedy="Look at where the data comes from: a file system, a download, memory; try num_workers=0.",
        )
    unseen = those(stands, Stand.UNSEEN)
    if unseen:
        nothing = f"nothing says where {ranks_text(unseen)} {agree(unseen, 'stands', 'stand')}"
        waits = (
            f"{ranks_text(waiting)} {agree(waiting, 'waits', 'wait')} in {calls_text(stall, waiting)}, and "
            if waiting
            else ""
        )
        message = "The stacks of these ranks cannot be seen, and their states and use of cores do not tell them apart."
        return Judged(
            named=(), title=waits + nothing, message=message, remedy="Let the stacks be seen (a note says how)."
        )
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
            message=f"{begun('; '.join(parts))}: their paths through the code differ.",
            remedy=_PATHS_REMEDY,
        )
    what = calls_text(stall, waiting)
    if stall.world_size is not None and stall.world_size > len(stall.ranks):
        return Judged(
            named=(),
            title=f"all ranks of this host wait in {what}",
            message=f"{begun(ranks_text(waiting))} of {stall.world_size} wait there, for a rank of another host or "
            "for a message that does not arrive.",
            remedy="Look at the reports of the other hosts: one names the rank that is not in this collective.",
        )
    return Judged(
        named=(),
        title=f"all ranks wait in {what}",
        message="Nobody is missing, and still it does not end: a message does not arrive, or was not sent.",
        remedy="Look at what the ranks share: network, firewall, interface, the ways between GPUs (`ddpdiag check`).",
    )
