"""What the climb came to, in findings."""

from collections.abc import Iterator
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import workarounds_text
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.p2p.fallback.causes import cause
from ddpdiag.checks.p2p.fallback.pairs import Places, places
from ddpdiag.checks.p2p.fallback.search import Ended, Kind, Part, Step
from ddpdiag.checks.p2p.fallback.text import (
    Climbed,
    against_gloo,
    error_text,
    gloo_text,
    not_tried,
    price,
    rate,
    ratio,
    runs_text,
    tried_lines,
    verb,
)
from ddpdiag.model import EventKind, Finding, Severity
from ddpdiag.model.recording import TOLD_TO_LEAVE
from ddpdiag.text import times_text

D = TypeVar("D")


def findings(seen: Seen[D], climbed: Climbed) -> Iterator[Finding]:
    """At most one."""
    if isinstance(climbed.end, Step):
        yield _unfinished(seen, climbed)
        return
    match climbed.end.kind:
        case Kind.FOUND if climbed.first.works and all(member in climbed.ground.own for member in climbed.end.members):
            yield _held_back(seen, climbed, climbed.end)
        case Kind.FOUND if climbed.first.works:
            yield _slow(seen, climbed, climbed.end)
        case Kind.FOUND:
            yield _fallback(seen, climbed, climbed.end)
        case Kind.HELD_BACK:
            yield _held_back(seen, climbed, climbed.end)
        case Kind.NEEDED:
            yield _needed(seen, climbed, climbed.end)
        case Kind.TRANSIENT:
            yield _transient(seen, climbed)
        case Kind.UNRELIABLE | Kind.NOTHING:
            yield _nothing(seen, climbed, climbed.end)


def both_fail(seen: Seen[D]) -> Finding:
    """gloo fails as well."""
    own = seen.world.backend
    return seen.finding(
        "both",
        f"gloo fails as well as {own}",
        f"The all-reduce fails over gloo and over {own}: that is the network, a host or a rank, and not how GPUs are "
        "joined, so no variable was looked for.",
        fix="Mend what the other findings name, then check again.",
    )


def _fallback(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    where = places(seen, climbed.tried, climbed.first, end, climbed.ground)
    does = verb(climbed.first)
    taken = " and ".join(dict.fromkeys(member.what for member in end.members))
    works = f"gloo works, and {own} {does}" if climbed.gloo is not None else f"{own} {does}"
    return seen.finding(
        "fallback",
        f"{own} {does}; {workarounds_text(env)} it works",
        f"{works}{where.text}{error_text(climbed.first)}. The way around leaves out {taken}: "
        f"{workarounds_text(env)} {own} worked in {runs_text(end)}"
        f"{price(climbed, end)}. {cause(seen, end.members, where.nodes)}".strip(),
        severity=Severity.WARNING if seen.options.uses_workarounds else Severity.ERROR,
        ranks=where.ranks,
        nodes=where.nodes,
        gpus=_gpus(seen, where),
        links=where.links,
        evidence=tried_lines(climbed),
        fix=f"Until the cause is mended, set in the job what follows (`ddpdiag check --env-file FILE` writes it); "
        f"with less than this it failed, and this was tried {len(end.runs)} times.{_untold(seen, end)}",
        env=env,
    )


def _slow(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    where = places(seen, climbed.tried, climbed.first, end, climbed.ground)
    taken = " and ".join(dict.fromkeys(member.what for member in end.members))
    times = times_text(ratio(climbed, end.runs))
    return seen.finding(
        "slow",
        f"{own} is slow; {workarounds_text(env)} it is {times} faster",
        f"{own} reaches {rate(climbed.first)} busbw{against_gloo(climbed)}{where.text}. The way around leaves "
        f"out {taken}: "
        f"{workarounds_text(env)} it is {times} faster in {runs_text(end)}{price(climbed, end)}. "
        f"{cause(seen, end.members, where.nodes)}".strip(),
        ranks=where.ranks,
        nodes=where.nodes,
        gpus=_gpus(seen, where),
        links=where.links,
        evidence=tried_lines(climbed),
        fix="Until the cause is mended, set in the job what follows.",
        env=env,
    )


def _held_back(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own, env = seen.world.backend, Step(Part.WHOLE, end.members).env
    settings = ", ".join(member.what for member in end.members)
    times = times_text(ratio(climbed, end.runs))
    return seen.finding(
        "held-back",
        f"{settings} costs bandwidth: without it {own} is {times} faster",
        f"{own} reaches {rate(climbed.first)} busbw with {settings}, and works without it in {runs_text(end)}"
        f"{price(climbed, end)}: {times} faster. It may be left from an old workaround.",
        evidence=tried_lines(climbed),
        fix="Take it out of the job, of the shell's start-up files and of ~/.nccl.conf and /etc/nccl.conf.",
        env=env,
    )


def _needed(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own = seen.world.backend
    settings = ", ".join(member.what for member in end.members)
    without = end.runs[-1]
    alone, them = len(end.members) == 1, "it" if len(end.members) == 1 else "them"
    return seen.finding(
        "needed",
        f"{settings} is needed here" if alone else f"of {settings} something is needed here",
        f"{own} works with {settings} ({rate(climbed.first)} busbw), and {verb(without)} without {them}"
        f"{error_text(without)}: keep {them} until the cause is mended.",
        evidence=tried_lines(climbed),
    )


def _transient(seen: Seen[D], climbed: Climbed) -> Finding:
    own = seen.world.backend
    runs = len(climbed.tried)
    return seen.finding(
        "transient",
        f"{own} failed once, and then worked {runs} times",
        f"The all-reduce over {own} failed at first, and worked in {runs} of {runs} runs in fresh processes, with "
        f"nothing changed ({rate(climbed.first)} busbw). What fails now and then will fail in a long job.",
        evidence=tried_lines(climbed),
        fix="Check again, and look at the kernel log of the hosts (Xid, link down) at the time of the failure.",
    )


def _nothing(seen: Seen[D], climbed: Climbed, end: Ended) -> Finding:
    own = seen.world.backend
    where = places(seen, climbed.tried, climbed.first, end, climbed.ground)
    does = verb(climbed.first) if not climbed.first.works else f"is slow ({rate(climbed.first)} busbw)"
    works = f"gloo works{gloo_text(climbed)}, and {own} {does}" if climbed.gloo is not None else f"{own} {does}"
    if end.kind is Kind.UNRELIABLE:
        bad = next(run for run in reversed(end.runs) if not run.works)
        env = Step(Part.WHOLE, end.members).env
        word, told = "unreliable", f"{workarounds_text(env)} it worked {len(end.runs) - 1} times and then {verb(bad)}"
    else:
        word, told = "nothing", f"{climbed.sets}, and none helps"
    return seen.finding(
        word,
        f"{own} {does}, and no variable gets around it",
        f"{works}{where.text}{error_text(climbed.first)}; {told}.{not_tried(climbed)}",
        severity=Severity.WARNING if climbed.first.works else Severity.ERROR,
        ranks=where.ranks,
        nodes=where.nodes,
        gpus=_gpus(seen, where),
        links=where.links,
        evidence=tried_lines(climbed),
        fix=f"Look at what {own} says with NCCL_DEBUG=INFO, at `nvidia-smi topo -m` and the kernel log; "
        "try another version of NCCL or of the driver.",
    )


def _unfinished(seen: Seen[D], climbed: Climbed) -> Finding:
    own, broken = seen.world.backend, climbed.ground.broken
    known = climbed.first if climbed.as_it_is else None
    if known is not None and not known.works:
        did = f"{own} {verb(known)}{error_text(known)}"
    else:
        did = f"{own} failed in {all_reduce.CHECK.code}" if broken else f"{own} works as it is"
    why, fix = _why_unfinished(seen)
    aim = "a way around was found" if broken or climbed.ground.slow_below is not None else "what is set was priced"
    return seen.finding(
        "unfinished",
        f"{why} before {aim}",
        f"{did}; {climbed.sets} until then, and more are left.",
        evidence=tried_lines(climbed),
        fix=fix,
    )


def _untold(seen: Seen[D], end: Ended) -> str:
    """That nobody knows between which ranks, where there was no time for it."""
    if not end.pairs_left or end.rounds:
        return ""
    return f" Between which ranks it fails was not looked at for lack of time (--budget {_more_seconds(seen)})."


def _more_seconds(seen: Seen[D]) -> int:
    return max(180, round(3 * seen.options.budget_seconds))


def _why_unfinished(seen: Seen[D]) -> tuple[str, str]:
    """What ended the climb, and what to do about it."""
    events = seen.recording.events
    lost = sorted({e.rank for e in events if e.kind is EventKind.LOST and e.rank is not None})
    if lost:
        return f"{ranks_text(lost)} was lost", "See RUN002; check again once that is mended."
    if any(e.kind in TOLD_TO_LEAVE for e in events):
        return "the run was told to end", "Let it run to its end."
    if seen.recording.end is None:
        return "the recording ends", "Judge the whole recording, or check again."
    return "the budget ended", f"Give it more time (--budget {_more_seconds(seen)})."


def _gpus(seen: Seen[D], where: Places) -> tuple[str, ...]:
    """The GPUs that the concerned ranks take."""
    taken = seen.of(devices.CHECK).by_rank
    chosen = (taken[rank].gpu for rank in where.concerned if rank in taken)
    return tuple(dict.fromkeys(gpu.uuid for gpu in chosen if gpu is not None and gpu.uuid))
