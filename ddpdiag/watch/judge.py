"""The judgement of a look at a silent training: which rank holds it up, and why.

The rules name ranks in this order: ranks that have ended, are stopped or stuck in the kernel; ranks that get no data;
ranks that posted another collective, or fewer; ranks for which the others wait in a collective; ranks that are
elsewhere in the code than most. The others wait for a named rank, which may be without fault. If all ranks
wait in the same way, no rank of this host is named: the missing rank runs on another host, or a message was lost.

The first rule that applies gives the first finding. Further findings name other ranks, if their state does not follow
from the first one: a rank that is not in a collective may only handle the error that the end of another rank caused.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote

from msgspec import structs

from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.evidence.attribution import MISMATCH_FIX
from ddpdiag.evidence.collectives import collective_text
from ddpdiag.evidence.ras_faults import find_faults
from ddpdiag.model import Finding, Scalar, Severity
from ddpdiag.stats import OddRanks, find_odd_ranks
from ddpdiag.text import begun
from ddpdiag.watch.look import Activity, Look, RankState, subject, where_text, without_lines
from ddpdiag.watch.processes import LAUNCHERS

# NVML shows 100 % for a GPU with an NCCL kernel that waits.
_BUSY_GPU_SHARE, _IDLE_GPU_SHARE = 0.9, 0.05
_MAX_STACKS = 4
_ELSEWHERE_FIX = "Find out why it is there (its stack, data and children): the other ranks only wait for it."
_WAIT_NAME = re.compile(r"wait|poll|sync|barrier|lock|recv|receive", re.IGNORECASE)
# A rank passes these collectives only after all ranks of the process group have entered them.
_JOINT_CALL = re.compile(r"all_(reduce|gather|to_all)\w*|reduce_scatter\w*|barrier|_engine_run_backward")
_HELPER_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is stuck in the kernel", "Z": "is dead"}


def judge(look: Look) -> tuple[Finding, ...]:
    """Judge a look. The ranks of a finding hold up the others; it has no ranks if the evidence cannot decide.

    The first finding is the most certain one. Its evidence has a line for each group of ranks that do the same, and the
    stacks of some ranks. No rank is in two findings.
    """
    lead, *others = _findings(look)
    named = [rank for finding in (lead, *others) for rank in finding.ranks]
    lines: list[Scalar] = [f"{ranks_text(ranks)}: {text}" for ranks, text in rank_groups(look, named)]
    stacks = {state.rank: state.stack for state in look.ranks if state.stack}
    # The stacks of some ranks that are named, and of one other rank.
    shown = [rank for rank in named if rank in stacks][:_MAX_STACKS]
    shown += [rank for rank in stacks if rank not in named][:1]
    evidence = {"ranks": lines} | {f"stack_of_rank_{rank}": [*stacks[rank]] for rank in shown}
    helpers = [helper for state in look.ranks if (helper := state.awaited_helper) is not None]
    evidence |= {f"stack_of_pid_{helper.pid}": [*helper.stack] for helper in helpers}
    return structs.replace(lead, evidence=evidence), *others


def _findings(look: Look) -> Iterator[Finding]:
    """Yield the finding of the first rule that applies, then those on other ranks that do not follow from it."""
    lead = next(finding for rule in RULES if (finding := rule(look)) is not None)
    yield lead
    remaining = _without(look, lead.ranks)
    for rule in _FURTHER_RULES.get(lead.code, ()) if lead.ranks else ():
        finding = rule(remaining)
        if finding is not None and (rule not in _ABSENCE_RULES or _are_surely_absent(look, finding.ranks)):
            yield finding
            remaining = _without(remaining, finding.ranks)
    if lead.severity is not Severity.NOTE:  # else the job makes progress
        yield from look.pitfalls


def _without(look: Look, ranks: Sequence[int]) -> Look:
    return structs.replace(look, ranks=tuple(state for state in look.ranks if state.rank not in ranks))


def _are_surely_absent(look: Look, ranks: Sequence[int]) -> bool:
    """Whether none of `ranks`, which are not in the others' collective, may be waiting for a rank of another finding.

    A wait for CUDA uses a core. A function such as `wait_for_file` may wait for any rank.
    """
    for state in (look.by_rank[rank] for rank in ranks):
        if state.activity is Activity.MAY_WAIT and not state.is_idle:
            return False
        if state.activity is not Activity.LOADING and _WAIT_NAME.search(state.call):
            return False
    return not look.may_continue_elsewhere


def _finding(code_word: str, title: str, message: str, fix: str = "", ranks: Sequence[int] = ()) -> Finding:
    return Finding(
        code=f"watch.{code_word}",
        severity=Severity.ERROR if ranks else Severity.WARNING,
        title=title,
        message=message,
        fix=fix,
        ranks=tuple(ranks),
    )


def _judge_progress(look: Look) -> Finding | None:
    if not look.progress:
        return None
    waiting = look.ranks_doing(Activity.WAITING)
    now = f" Now {look.waiting_text(waiting)}." if waiting else ""
    return structs.replace(_finding("progress", "the job makes progress", look.progress + now), severity=Severity.NOTE)


def _judge_unsettled(look: Look) -> Finding | None:
    if not look.is_unsettled:
        return None
    return _finding(
        "unsettled",
        "the ranks move, but no rank was seen to leave a collective",
        "The job may be in a long step, or starting.",
        "Make the stacks readable (a note shows how)."
        if look.ranks_doing(Activity.NO_STACK)
        else "Look for longer: `--every 10`.",
    )


def _judge_ended_ranks(look: Look) -> Finding | None:
    ranks = look.ranks_doing(Activity.ENDED)
    if not ranks or (len(ranks) < len(look.ranks) and not look.ranks_doing(Activity.WAITING)):
        return None
    return _finding(
        "gone",
        f"{subject(ranks, 'has', 'have')} ended, and the command still runs",
        f"The process of {ranks_text(ranks)} has ended; the launcher has not noticed, or waits for something else."
        + look.others_waiting_text(ranks),
        "Look at its last output, and at the kernel log of the host (out of memory, segfault).",
        ranks,
    )


def _judge_remaining_ranks(look: Look) -> Finding | None:
    """Name no rank if some ranks have ended and no rank is known to wait. Usually rank 0 then saves the model."""
    ended = look.ranks_doing(Activity.ENDED)
    left = tuple(sorted(rank for rank in look.by_rank if rank not in ended))
    if not ended or not left:
        return None
    return _finding(
        "last",
        f"{subject(ended, 'has', 'have')} ended, but not {ranks_text(left)}{look.place_text(left)}",
        f"No rank is known to wait for another one; {subject(left, 'has', 'have')} not ended{look.doing_text(left)}",
        "Check what it does there: it may be the last save.",
    )


def _judge_stopped_ranks(look: Look) -> Finding | None:
    ranks = look.ranks_doing(Activity.STOPPED)
    if not ranks:
        return None
    pids = ", ".join(str(look.by_rank[rank].pid) for rank in ranks)
    return _finding(
        "stopped",
        f"{subject(ranks, 'is', 'are')} stopped",
        f"pid {pids} {'is' if len(ranks) == 1 else 'are'} in state T, after SIGSTOP or in a debugger."
        + look.others_waiting_text(ranks),
        f"Find out what stopped it (a debugger, a job suspend); `kill -CONT {pids.replace(',', '')}` continues it.",
        ranks,
    )


def _judge_unread_output(look: Look) -> Finding | None:
    if look.blocked_seconds < look.stall_seconds:
        return None
    return _finding(
        "blocked",
        "the output of the command is not read",
        f"The program behind the pipe has read no output for {look.blocked_seconds:.0f} s, so the ranks "
        "wait until they can print.",
        "Look at the program that reads the output (a pager, a full disk), or write the output to a file.",
    )


def _judge_stuck_ranks(look: Look) -> Finding | None:
    ranks = look.ranks_doing(Activity.STUCK)
    if not ranks:
        return None
    places = {p.wchan for rank in ranks if (p := look.by_rank[rank].process) is not None and p.wchan}
    where = f", in {', '.join(sorted(places))}" if places else ""
    return _finding(
        "stuck",
        f"{subject(ranks, 'is', 'are')} stuck in the kernel",
        f"State D{where}: a file system, a disk or a driver does not respond." + look.others_waiting_text(ranks),
        "Look at the kernel log of the host (NFS server not responding, NVRM: Xid), and at its mounts.",
        ranks,
    )


def _judge_ranks_without_data(look: Look) -> Finding | None:
    """Name ranks that wait for data from a worker process that is stopped, stuck or dead."""
    helpers = {
        rank: [helper for helper in look.by_rank[rank].helpers if helper.state in _HELPER_STATES]
        for rank in look.ranks_doing(Activity.LOADING)
    }
    ranks = tuple(rank for rank, failing in helpers.items() if failing)
    if not ranks:
        return None
    helper = helpers[ranks[0]][0]
    where = f" in {helper.wchan}" if helper.wchan and helper.state == "D" else ""
    at = f", in {where_text(helper.stack, helper.user_frames)}" if helper.stack else ""
    return _finding(
        "starved",
        f"{subject(ranks, 'waits', 'wait')} for data that does not arrive",
        f"A process that loads data for rank {ranks[0]} (pid {helper.pid}, {helper.name}) "
        f"{_HELPER_STATES[helper.state or '']}{where}{at}." + look.others_waiting_text(ranks),
        f"Find out what stopped it; `kill -CONT {helper.pid}` continues it."
        if helper.state in ("T", "t")
        else "Look at that process first: /dev/shm full, out of memory, a file system that does not respond.",
        ranks,
    )


def _judge_mismatch(look: Look) -> Finding | None:
    """Name ranks that posted another collective than most ranks."""
    return next((_as_seen(look, fault) for fault in look.recorded_faults if fault.code == "dump.mismatch"), None)


def _judge_recorders(look: Look) -> Finding | None:
    """Name ranks for which others wait, by the flight recorders, unless they themselves wait in a collective."""
    for fault in look.recorded_faults:
        is_absence = fault.code == "dump.behind"
        ranks = tuple(r for r in fault.ranks if not is_absence or look.activities[r] is not Activity.WAITING)
        if ranks and fault.code in ("dump.behind", "dump.stuck", "dump.deadlock"):
            return _as_seen(look, structs.replace(fault, ranks=ranks), _ELSEWHERE_FIX if is_absence else fault.fix)
    return None


def _as_seen(look: Look, fault: Finding, fix: str = MISMATCH_FIX) -> Finding:
    """`fault` of flight recorders, with what its ranks do now."""
    doing = f" {begun(ranks_text(fault.ranks))}{look.doing_text(fault.ranks)}" if fault.ranks else ""
    return structs.replace(
        fault, code=fault.code.replace("dump.", "watch."), message=f"{fault.message}{doing}", fix=fix
    )


def _judge_ras(look: Look) -> Finding | None:
    """Take the first fault that NCCL's RAS shows. It knows the ranks of all hosts."""
    if look.ras.snapshots is None:
        return None
    waiting = look.ranks_doing(Activity.WAITING)
    # A wait for CUDA uses a core, and an NCCL kernel that waits the GPU.
    states = [look.by_rank[rank] for rank in look.ranks_doing(Activity.MAY_WAIT, Activity.NO_STACK)]
    shares = _gpu_shares(look, [state.rank for state in states if state.holds_gpu and not state.is_idle])
    may_wait = {rank for rank, share in shares.items() if share is None or share > _IDLE_GPU_SHARE}
    busy = {rank for rank, share in shares.items() if share is not None and share >= _BUSY_GPU_SHARE}
    faults = find_faults(
        *look.ras.snapshots,
        look.ras.seconds,
        world_size=look.world_size,
        waiting={*waiting, *may_wait},
        in_collective={*waiting, *(busy if look.all_unmoved else ())} == look.by_rank.keys(),
    )
    if not faults:
        return None
    local = [rank for rank in faults[0].ranks if rank in look.by_rank]
    where = f" Here{look.doing_text(local)}" if local else ""
    return structs.replace(faults[0], message=f"{faults[0].message}{where}")


def _judge_single_process(look: Look) -> Finding | None:
    if len(look.ranks) != 1 or (look.world_size or 1) > 1:
        return None
    state = look.ranks[0]
    if look.ranks_are_guessed and (launcher := look.command) in LAUNCHERS:
        return _finding(
            "remote",
            "no rank was found on this host",
            f"{launcher} started the ranks on other hosts, or not as its own children.",
            f"Start `ddpdiag watch` on each host: `{quote(launcher)} ddpdiag watch -- COMMAND`.",
        )
    if state.is_launching:
        return _finding(
            "launcher",
            "the launcher waits for other hosts",
            "torchrun has started no rank here: it waits until as many hosts as given by --nnodes have joined.",
            "Check whether the command runs on all hosts, with the same --rdzv-endpoint and --rdzv-id.",
        )
    return _finding(
        "alone",
        f"the only process of the training {f'is {state_text(state.process)}' if state.process else 'has ended'}",
        f"It is {state.activity_text}.",
        "Look at its stack." if state.stack else "",
        (state.rank,),
    )


def _judge_host_without_rank_0(look: Look) -> Finding | None:
    """Name no rank if rank 0 runs on another host and the training may continue there."""
    if not look.may_continue_elsewhere:
        return None
    return _finding(
        "apart",
        "no output on this host, and nothing shows whether the training continues",
        "Rank 0, mostly the only rank that prints, runs on another host. The ranks here may do the same in a "
        "healthy training; the next look shows whether they are still at the same place.",
        "Look at the output and the report of rank 0's host. --output FILE or --flight-recorder shows progress here.",
    )


def _judge_awaited_ranks(look: Look) -> Finding | None:
    """Name ranks that are not in the collective in which other ranks wait."""
    waiting, absent = look.ranks_doing(Activity.WAITING), look.ranks_doing(Activity.ELSEWHERE, Activity.LOADING)
    if not waiting or not absent:
        return None
    return _finding(
        "awaited",
        f"{subject(waiting, 'waits', 'wait')} for {ranks_text(absent)}{look.place_text(absent)}",
        f"{begun(look.waiting_text(waiting))}; {subject(absent, 'is', 'are')} not in it{look.doing_text(absent)}",
        _ELSEWHERE_FIX,
        absent,
    )


def _judge_ranks_without_stack(look: Look) -> Finding | None:
    """Name ranks without a stack that use a core if all others sleep, because ranks that wait over gloo sleep."""
    # In a job with GPUs, a rank that uses a core may be waiting.
    may_hold_gpus = any(state.holds_gpu is None and state.process is not None for state in look.ranks)
    if any(state.holds_gpu for state in look.ranks) or (may_hold_gpus and (look.gpus or look.why_no_gpus)):
        return None
    busy = tuple(rank for rank in look.ranks_doing(Activity.NO_STACK) if look.by_rank[rank].is_busy)
    others = [state.rank for state in look.ranks if state.rank not in busy]
    if not busy or not others or not all(look.by_rank[rank].is_idle for rank in others):
        return None
    waiting = look.ranks_doing(Activity.WAITING)
    doing = f"waits in {look.calls_text(waiting)}" if len(waiting) == len(others) == 1 else "sleeps"
    return _finding(
        "busy",
        f"only {subject(busy, 'runs', 'run')}, {subject(others, doing, 'sleep')}",
        f"{begun(subject(busy, 'uses', 'use'))} a core; {subject(others, 'uses', 'use')} none, like "
        f"ranks that wait for another one over gloo. No stack of {ranks_text(busy)} can be read.",
        "Make its stack readable (a note shows how), and request a new look with SIGUSR1.",
        busy,
    )


def _judge_idle_gpus(look: Look) -> Finding | None:
    """Name ranks whose GPU is idle if all other GPUs are busy, because an NCCL kernel that waits keeps a GPU busy."""
    shares = _gpu_shares(look, look.ranks_doing(Activity.MAY_WAIT))
    idle = tuple(rank for rank, share in shares.items() if share is not None and share <= _IDLE_GPU_SHARE)
    busy = tuple(rank for rank, share in shares.items() if share is not None and share >= _BUSY_GPU_SHARE)
    if not idle or not busy or len(idle) + len(busy) != len(look.ranks):
        return None
    return _finding(
        "idle-gpu",
        f"the GPU of {ranks_text(idle)} is idle, while the others are busy",
        f"The GPUs of {ranks_text(busy)} are busy, as in an NCCL kernel that waits for another rank; "
        f"{ranks_text(idle)} launched no kernel{look.doing_text(idle)}",
        _ELSEWHERE_FIX,
        idle,
    )


def _gpu_shares(look: Look, ranks: Sequence[int]) -> Mapping[int, float | None]:
    """The share of time in which the GPU of each of `ranks` is busy (None: not known)."""
    shares = {pid: use.busy_share for use in look.gpus for pid in use.pids}
    return {rank: shares.get(look.by_rank[rank].pid) for rank in ranks}


def _judge_ranks_elsewhere(look: Look) -> Finding | None:
    """Name ranks that are at another place in the code than most ranks, if no rank is known to wait."""
    known = look.ranks_doing(Activity.ELSEWHERE, Activity.MAY_WAIT, Activity.LOADING)
    places = {rank: look.by_rank[rank].place for rank in known}
    odd = find_odd_ranks(places) if len(known) == len(look.ranks) else None
    if odd is None or not odd.ranks:
        return None
    others = tuple(rank for rank in places if rank not in odd.ranks)
    return _finding(
        "odd",
        f"{subject(odd.ranks, 'is', 'are')} elsewhere in the code than the others",
        f"{begun(subject(others, 'is', 'are'))} in {without_lines(look.by_rank[others[0]].where_text)}, "
        f"{subject(odd.ranks, 'is', 'are')} not{look.doing_text(odd.ranks)}",
        _ELSEWHERE_FIX,
        odd.ranks,
    )


def _judge_joint_calls(look: Look) -> Finding | None:
    """Report that ranks wait in different collectives, which may be of different groups. It names no rank."""
    calls = {
        rank: look.by_rank[rank].call
        for rank in look.ranks_doing(Activity.WAITING)
        if look.by_rank[rank].witness is None
    }
    odd = find_odd_ranks({rank: call for rank, call in calls.items() if _JOINT_CALL.fullmatch(call)})
    if odd is None:
        return None
    return _finding(
        "paths",
        "the waiting ranks are in different collectives",
        f"{begun(_calls_text(look, odd))}. Unless these collectives belong to different process groups, the ranks took "
        "different paths in the code.",
        MISMATCH_FIX,
    )


def _calls_text(look: Look, odd: OddRanks) -> str:
    return "; ".join(f"{ranks_text(ranks)} in {look.calls_text(ranks)}" for ranks in odd.by_value.values())


def _judge_waiting_ranks(look: Look) -> Finding | None:
    waiting = look.ranks_doing(Activity.WAITING)
    if not waiting or len(waiting) != len(look.ranks):
        return None
    odd = find_odd_ranks({state.rank: state.call for state in look.ranks})
    if odd is not None:
        return _finding(
            "paths",
            "the ranks wait in different collectives",
            f"{begun(_calls_text(look, odd))}: they took different paths in the code.",
            MISMATCH_FIX,
            odd.ranks,
        )
    what = look.calls_text(waiting)
    if look.world_size is not None and look.world_size > len(look.ranks):
        return _finding(
            "elsewhere",
            f"all ranks of this host wait in {what}",
            f"{begun(ranks_text(waiting))} of {look.world_size} wait there, for a rank of another host "
            "or for a message that does not arrive.",
            "Look at the reports of the other hosts: one names the rank that is not in this collective.",
        )
    return _finding(
        "message",
        f"all ranks wait in {what}",
        "No rank is missing, but the collective does not end: a message does not arrive, or was not sent.",
        "Look at what the ranks share: network, firewall, interface, the paths between GPUs (`ddpdiag check`).",
    )


def _judge_undecided(look: Look) -> Finding:
    if not look.ranks:
        message = "No process of the command has a rank (RANK, SLURM_PROCID and such), and none of them runs Python."
        return _finding("no-rank", "no rank was found", message)
    loading, without_stack = look.ranks_doing(Activity.LOADING), look.ranks_doing(Activity.NO_STACK)
    if len(loading) == len(look.ranks):
        return _finding(
            "data",
            f"{ranks_text(loading)} wait for their data",
            "Every rank waits for its data loader, and its workers are alive." + look.helpers_text(loading),
            "Look at the source of the data: a file system, a download, memory; try num_workers=0.",
        )
    if without_stack:
        waiting = look.ranks_doing(Activity.WAITING)
        waits = f"{look.waiting_text(waiting)}; " if waiting else ""
        return _finding(
            "no-stack",
            f"{waits}no stack of {ranks_text(without_stack)} can be read",
            "These ranks show no stack, and their states and use of cores do not distinguish them.",
            "Make the stacks readable (a note shows how).",
        )
    return _finding(
        "alike",
        "no rank differs from the others",
        "No rank of this host is known to wait for another one, and most are not at one place in the code.",
        "If a healthy run of the job is silent for so long, give a longer --stall.",
    )


RULES: tuple[Callable[[Look], Finding | None], ...] = (
    _judge_progress,
    _judge_unsettled,
    _judge_ended_ranks,
    _judge_stopped_ranks,
    _judge_unread_output,
    _judge_stuck_ranks,
    _judge_ranks_without_data,
    _judge_remaining_ranks,
    _judge_mismatch,
    _judge_recorders,
    _judge_ras,
    _judge_single_process,
    _judge_host_without_rank_0,
    _judge_awaited_ranks,
    _judge_ranks_without_stack,
    _judge_idle_gpus,
    _judge_ranks_elsewhere,
    _judge_waiting_ranks,
    _judge_undecided,
)
_ABSENCE_RULES = (_judge_recorders, _judge_awaited_ranks, _judge_joint_calls)
_COLLECTIVE_RULES = (_judge_mismatch, *_ABSENCE_RULES)
# By the code of the first finding: the rules whose findings do not follow from it.
_FURTHER_RULES: Mapping[str, tuple[Callable[[Look], Finding | None], ...]] = {
    "watch.gone": (_judge_stopped_ranks, _judge_stuck_ranks, _judge_ranks_without_data),
    "watch.stopped": (_judge_stuck_ranks, _judge_ranks_without_data, *_COLLECTIVE_RULES),
    "watch.stuck": (_judge_ranks_without_data, *_COLLECTIVE_RULES),
    "watch.starved": _COLLECTIVE_RULES,
    "watch.mismatch": (_judge_recorders, _judge_awaited_ranks),
    "watch.awaited": (_judge_joint_calls,),
}


def rank_groups(look: Look, named_ranks: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
    """The groups of ranks that do the same, with what they do: groups of `named_ranks` first, then by size."""
    groups: dict[tuple[bool, str], list[RankState]] = defaultdict(list)
    for state in look.ranks:
        # The line differs in a loop, so it is shown only if it is the same for all ranks of a group.
        groups[state.rank not in named_ranks, without_lines(_group_text(state))].append(state)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1][0].rank))
    rows = []
    for (_, text), states in ordered:
        texts = {_group_text(state) for state in states}
        rows.append((tuple(state.rank for state in states), texts.pop() if len(texts) == 1 else text))
    return rows


def _group_text(state: RankState) -> str:
    process = state.process
    if process is None:
        return "ended"
    text = state_text(process) + (f" in {state.where_text}" if process.stack else "")
    if not process.stack and process.wchan:
        text += f" in the kernel's {process.wchan}"
    if state.is_busy:
        text += ", using a core"
    end = state.last_collective
    if end is not None:
        text += f"; last posted {collective_text(end)}"
    elif state.witness is not None:
        text += "; posted nothing"
    return text


def missing_evidence(look: Look) -> tuple[str, ...]:
    """Sentences that say which evidence the look lacks, such as stacks or collectives, and why."""
    numbering = "No variable names the ranks, so they are numbered in the order of their start."
    # Only NCCL's flight recorders can be read, so none is missing without GPUs, unless --flight-recorder was given.
    with_recorder = (state for state in look.ranks if state.holds_gpu or look.has_flight_recorder)
    return (
        *look.missing_evidence,
        *_reason_sentences("No stack", {state.rank: state.why_no_stack for state in look.ranks}),
        *_reason_sentences("No collectives", {state.rank: state.why_no_collectives for state in with_recorder}),
        *([f"No answer of NCCL's RAS: {look.ras.why_missing}."] if look.ras.why_missing else []),
        *([numbering] if look.ranks_are_guessed and len(look.ranks) > 1 else []),
    )


def _reason_sentences(what: str, reasons: Mapping[int, str]) -> Iterator[str]:
    """Yield a sentence for each reason why `what` is missing, with all ranks that share it. Skip empty reasons."""
    for reason in dict.fromkeys(filter(None, reasons.values())):
        ranks = [rank for rank, other in reasons.items() if other == reason]
        yield f"{what} of {ranks_text(ranks)}: {reason}."
