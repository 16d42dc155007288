"""What a look at a silent training means: which rank holds it up, and why.

If all wait alike, no rank of this host is named: the missing one runs on another host, or a message was lost. Of a
command that failed, what it wrote shows why: what passed through a pipe is read, and what files hold since the start;
what went to a terminal cannot be.
"""

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import structs

from ddpdiag.checks.failure_evidence import state_text
from ddpdiag.checks.hosts import names_text, ranks_text
from ddpdiag.checks.known_errors import as_known, first_reason
from ddpdiag.checks.posted import in_words, last
from ddpdiag.errors import UsageError
from ddpdiag.stats import odd_ones_out
from ddpdiag.text import begun
from ddpdiag.watch.model import (
    Activity,
    Failure,
    Judged,
    Look,
    RankGroup,
    RankSeen,
    Stall,
    call_of,
    is_busy,
    is_importing,
    place_of,
)
from ddpdiag.watch.output import Sink
from ddpdiag.watch.rules import PATHS_FIX, RULES

_MOST_STACKS = 4
_MOST_HOSTS = 16
# A look takes up to 5 s, and clocks of hosts differ by a second or two.
_SLACK_SECONDS = 10.0
# A file system may not respond.
_READ_SECONDS = 5.0


def is_start(stall: Stall) -> bool:
    """Are ranks still importing, and all others wait for them?"""
    activities = Look(stall).activities
    at_work = {seen.rank for seen in stall.ranks if is_importing(seen)}
    return bool(at_work) and all(rank in at_work or doing is Activity.WAITING for rank, doing in activities.items())


def progress_age(stall: Stall) -> float | None:
    """Seconds since any rank posted a collective, as far as flight recorders show."""
    return min((seen.posted_seconds for seen in stall.ranks if seen.posted_seconds is not None), default=None)


def judged(stall: Stall) -> Judged:
    """What the look means, and what each rank does; of a command that failed, why."""
    if stall.failure is not None:
        cause = stall.failure.known
        who = f"{ranks_text(stall.failure.ranks)}: " if stall.failure.ranks else ""
        awaited = f" It waited for {ranks_text(stall.failure.missing)}." if stall.failure.missing else ""
        return Judged(
            # Ranks that wait are not named, but those for which they wait.
            named=stall.failure.missing if cause.is_wait else stall.failure.ranks,
            title=f"{who}{cause.title}",
            message=f'{cause.more}{awaited} The command printed "{cause.quote}".'.strip(),
            fix=cause.fix,
            notes=stall.notes,
        )
    look = Look(stall)
    verdict = next((v for rule in RULES if (v := rule(look)) is not None), None) or _undecided(look)
    named = verdict.named
    # Ranks that do the same; those that are named come first, then the smallest groups.
    groups: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for seen in stall.ranks:
        groups[seen.rank not in named, _group_text(seen)].append(seen.rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    # Stacks of some of the named, and of one of those that wait.
    known = [(seen.rank, seen.process.stack) for seen in stall.ranks if seen.process and seen.process.stack]
    first = [row for row in known if row[0] in named][:_MOST_STACKS]
    others = [row for row in known if row[0] not in named][:1]
    guessed = "No variable names the ranks, so they are numbered in the order of their start."
    stackless = _reasons("No stack", {seen.rank: seen.no_stack for seen in stall.ranks})
    # Only NCCL can be asked, so that a job without GPUs lacks nothing, unless its recorders were asked for.
    silent = {seen.rank: seen.no_collectives for seen in stall.ranks if seen.holds_gpu or stall.recorder}
    traceless = _reasons("No collectives", silent)
    return structs.replace(
        verdict,
        groups=tuple(RankGroup(ranks=tuple(ranks), text=text) for (_, text), ranks in ordered),
        stacks={f"rank {rank}": stack for rank, stack in (*first, *others)},
        notes=(*stall.notes, *stackless, *traceless, *([guessed] if stall.guessed and len(stall.ranks) > 1 else [])),
    )


def _undecided(look: Look) -> Judged:
    """The ranks do not differ."""
    if not look.stall.ranks:
        message = "No process of the command has a rank (RANK, SLURM_PROCID and such), and none of them runs Python."
        return Judged(title="no rank was found", message=message)
    waiting = look.ranks(Activity.WAITING)
    if len(waiting) == len(look.stall.ranks):
        return _all_wait(look, waiting)
    who, loading = ranks_text(sorted(look.activities)), look.ranks(Activity.LOADING)
    if len(loading) == len(look.stall.ranks):
        return Judged(
            title=f"{who} wait for their data",
            message="Every rank waits for its data loader, and its workers are alive.",
            fix="Look at the source of the data: a file system, a download, memory; try num_workers=0.",
        )
    unseen = look.ranks(Activity.UNSEEN)
    if unseen:
        unknown = f"no stack of {ranks_text(unseen)} can be read"
        waits = f"{look.waiting_text(waiting)}; " if waiting else ""
        message = "These ranks show no stack, and their states and use of cores do not distinguish them."
        return Judged(title=waits + unknown, message=message, fix="Make the stacks readable (a note shows how).")
    return Judged(
        title="no rank differs from the others",
        message="No rank of this host is known to wait for another one, and most are not at one place in the code.",
        fix="If a healthy run of the job is silent for so long, give a longer --stall.",
    )


def _all_wait(look: Look, waiting: Sequence[int]) -> Judged:
    found = odd_ones_out({seen.rank: call_of(seen.process) for seen in look.stall.ranks if seen.process is not None})
    if found is not None:
        parts = [f"{ranks_text(ranks)} in {call}" for call, ranks in found.groups.items()]
        return Judged(
            named=found.ranks,
            title="the ranks wait in different collectives",
            message=f"{begun('; '.join(parts))}: they took different paths in the code.",
            fix=PATHS_FIX,
        )
    what = look.calls_text(waiting)
    if look.stall.world_size is not None and look.stall.world_size > len(look.stall.ranks):
        return Judged(
            title=f"all ranks of this host wait in {what}",
            message=f"{begun(ranks_text(waiting))} of {look.stall.world_size} wait there, for a rank of another host "
            "or for a message that does not arrive.",
            fix="Look at the reports of the other hosts: one names the rank that is not in this collective.",
        )
    return Judged(
        title=f"all ranks wait in {what}",
        message="No rank is missing, but the collective does not end: a message does not arrive, or was not sent.",
        fix="Look at what the ranks share: network, firewall, interface, the paths between GPUs (`ddpdiag check`).",
    )


# What is shown -------------------------------------------------------------------------------------------------------


def _group_text(seen: RankSeen) -> str:
    """What one rank does, without what differs between ranks that do the same."""
    process = seen.process
    if process is None:
        return "ended"
    text = state_text(process) + (f" in {place_of(process)})" if process.stack else "")
    if not process.stack and process.wchan:
        text += f" in the kernel's {process.wchan}"
    if is_busy(seen):
        text += ", using a core"
    end = last(seen.collectives)
    if end is not None:
        text += f"; last posted {in_words(end)}"
    elif seen.collectives is not None:
        text += "; posted nothing"
    return text


def _reasons(what: str, by_rank: Mapping[int, str]) -> list[str]:
    """A sentence for each reason, with its ranks."""
    reasons: dict[str, list[int]] = defaultdict(list)
    for rank, reason in by_rank.items():
        if reason:
            reasons[reason].append(rank)
    return [f"{what} of {ranks_text(ranks)}: {reason}." for reason, ranks in reasons.items()]


# A command that failed -----------------------------------------------------------------------------------------------


def read_failure(sinks: Iterable[Sink], status: int) -> Failure | None:
    """Why a command with this wait status failed; None where it did not, or no known text in time gives the reason."""
    if status == 0:
        return None
    found: list[Failure | None] = []
    written = chain.from_iterable(sink.written() for sink in sinks)
    reader = threading.Thread(target=lambda: found.append(failure_of(written, status)), daemon=True)
    reader.start()
    reader.join(_READ_SECONDS)
    return found[0] if found else None


def failure_of(written: Iterable[bytes], status: int) -> Failure | None:
    """The reason that `written` gives for the end of a command with this wait status."""
    if (sighting := first_reason(written)) is None:
        return None
    code = os.waitstatus_to_exitcode(status)
    ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return Failure(ended=ended, known=as_known(sighting), ranks=sighting.ranks, missing=sighting.missing)


# Looks of several hosts ----------------------------------------------------------------------------------------------


def merged(stalls: Sequence[Stall]) -> Stall:
    """The last look of each host at the newest silence, together; UsageError if two hosts both have a rank.

    A host is known by its name. Processes have numbers of their own on each, so GPUs are left out. A host that has no
    look at the newest silence is left out, and a note says so.
    """
    known = [stall for stall in stalls if not stall.guessed] or stalls
    newest = max(known, key=lambda stall: stall.unix_seconds)
    joined = [newest]
    if not newest.guessed:
        # Looks at the same silence: each lies in the other's time.
        close = [stall for stall in known if _is_within(newest, stall.unix_seconds)]
        joined = _joined([stall for stall in close if _is_within(stall, newest.unix_seconds)])
    notes = (*dict.fromkeys(note for stall in joined for note in stall.notes), *_left_out(stalls, joined))
    if len(joined) == 1:
        return structs.replace(newest, notes=notes)
    hosts = {stall.host for stall in joined}
    first = min(joined, key=lambda stall: stall.silent_seconds)
    failed = [(stall.failure.known.is_wait, stall.unix_seconds, stall.failure) for stall in joined if stall.failure]
    return structs.replace(
        first,
        # The first of the hosts whose command failed for a reason of its own.
        failure=min(failed, key=lambda row: row[:2])[2] if failed else None,
        host=f"{len(hosts)} hosts" if len(hosts) > 1 else first.host,
        ranks=tuple(sorted((seen for stall in joined for seen in stall.ranks), key=lambda seen: seen.rank)),
        gpus=(),
        gpus_unseen="",
        notes=(*notes, *_places(joined)) if len(hosts) > 1 else notes,
    )


def _is_within(stall: Stall, unix_seconds: float) -> bool:
    """Is it between the begin of a look's silence, and when the next look at it was due?

    A host looks at a silence once, and again after twice, four times ... the patience: had the silence gone on, there
    would be that look.
    """
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
        if not taken and (stall.ranks or all(other.host != stall.host for other in joined)):
            joined.append(stall)
            owners |= {seen.rank: stall.host for seen in stall.ranks}
    return joined


def _left_out(stalls: Sequence[Stall], joined: Sequence[Stall]) -> Iterator[str]:
    """Hosts of which no look was taken, and why."""
    newest = {stall.host: stall for stall in sorted(stalls, key=lambda stall: (not stall.guessed, stall.unix_seconds))}
    out = [stall for host, stall in newest.items() if all(other.host != host for other in joined)]
    if nameless := [stall.host for stall in out if stall.guessed]:
        yield f"Left out: {names_text(nameless)}, where no variable names the ranks."
    by_age: dict[str, list[str]] = {}
    for stall in out:
        if not stall.guessed:
            by_age.setdefault(f"{joined[0].unix_seconds - stall.unix_seconds:.0f}", []).append(stall.host)
    for age, hosts in by_age.items():
        which = f"{names_text(hosts)}, with a look {age} s earlier"
        yield f"Left out: {which}: it belongs to another silence, or a clock is wrong."


def _places(stalls: Sequence[Stall]) -> Iterator[str]:
    """Which ranks each host has."""
    ordered = sorted((stall for stall in stalls if stall.ranks), key=lambda stall: stall.ranks[0].rank)
    places = [f"{ranks_text([seen.rank for seen in stall.ranks])} on {stall.host}" for stall in ordered]
    more = f" and {len(places) - _MOST_HOSTS} more hosts" if len(places) > _MOST_HOSTS else ""
    yield f"{'; '.join(places[:_MOST_HOSTS])}{more}."
