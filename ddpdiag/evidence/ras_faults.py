"""Attribution of a hang from two answers of NCCL's RAS.

A rank counts a collective when it launches it, and then waits on its GPU. So in a job that hangs no count changes, and
the ranks with the lowest counts did not launch what the others wait for. RAS itself lists the ranks that are ahead
(nccl issue 1911). But a rank whose program waits for its GPU at an earlier place has a lower count, too, because the
programs of the others run ahead of their GPUs. Such a rank is not named if it is known to wait.

Equal counts that do not change are a hang if the job is known to be in a collective (vllm issue 48720). But a program
that evaluates, saves or compiles has such counts, too.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpdiag.evidence.attribution import MISMATCH_FIX
from ddpdiag.evidence.ras import Communicator, Member, MemberState, Snapshot
from ddpdiag.model import Finding, Severity
from ddpdiag.stats import find_odd_ranks
from ddpdiag.text import begun, listed, ranks_text

_MAX_SHOWN = 4
_REMOTE_ERROR = 6  # ncclRemoteError: another rank failed
_LOG_FIX = "Look at its log and at the kernel log of its host (Xid, out of memory)."
_STACK_FIX = "Look at its Python stack (`py-spy dump --pid PID`): if it waits for its GPU there, look at that GPU."
_NETWORK_FIX = "Look at what the ranks share: network, firewall, interface, the paths between GPUs (`ddpdiag check`)."
# The word of the finding's code, the title after the ranks, and the fix.
_Texts = tuple[str, str, str]
_BEHIND = ("behind", "launched fewer collectives than the others, which wait", _STACK_FIX)
_MISMATCH = ("mismatch", "launched other collectives than the others", MISMATCH_FIX)
_GONE: Mapping[MemberState, _Texts] = {
    MemberState.DEAD: ("dead", "did not respond to NCCL's RAS for 60 s", _LOG_FIX),
    MemberState.UNREACHABLE: ("unreachable", "did not respond to NCCL's RAS", _LOG_FIX),
    MemberState.ERROR: ("error", "got an error from NCCL", "Look for NCCL WARN in its log (NCCL_DEBUG=WARN)."),
}
# Of ranks whose state differs from that of running ranks of the same communicator.
_ELSEWHERE: Mapping[MemberState, _Texts] = {
    MemberState.MISSING: ("missing", "left a communicator in which others remain", _LOG_FIX),
    MemberState.ABORT: ("missing", "aborted a communicator in which others remain", _LOG_FIX),
    MemberState.FINALIZE: ("missing", "closed a communicator in which others remain", _STACK_FIX),
    MemberState.INIT: ("init", "did not finish ncclCommInitRank, but others did", _STACK_FIX),
}


class _Suspect(NamedTuple):
    """A rank of a communicator, and its rank in the job (None: not known)."""

    communicator: Communicator
    member: Member
    rank: int | None

    @property
    def key(self) -> object:
        """The same for a rank in all communicators, if its rank in the job is known."""
        return (self.communicator.hash, self.member.rank) if self.rank is None else self.rank


def find_faults(
    before: Snapshot,
    now: Snapshot,
    seconds: float,
    *,
    world_size: int | None,
    waiting: Collection[int] = (),
    in_collective: bool = False,
) -> list[Finding]:
    """Find why the job hangs, from snapshots that are `seconds` apart. Empty if some count changed, or nothing is odd.

    `waiting` are ranks known to wait for other ranks or for their GPU. `in_collective`: the job is in a collective.
    """
    earlier, members = _members(before), _members(now)
    if any(_has_progressed(earlier[place], member) for place, member in members.items() if place in earlier):
        return []
    suspects = _suspects(now, world_size)
    gone = [each for each in suspects if each.key not in waiting and not _is_late(each, earlier)]
    if faults := _state_findings(gone, _GONE):
        return [fault for fault in faults if fault.code != "ras.error"] or faults
    if earlier != members:
        return []
    running = {each.communicator.hash for each in suspects if each.member.state is MemberState.RUNNING}
    stalled = _stalled(suspects, seconds, waiting, in_collective=in_collective and now.is_complete)
    return [*stalled] or _state_findings([each for each in suspects if each.communicator.hash in running], _ELSEWHERE)


def _has_progressed(earlier: Member, member: Member) -> bool:
    return bool(earlier.launched and member.launched) and earlier.launched != member.launched


def _is_late(suspect: _Suspect, earlier: Mapping[tuple[str, int], Member]) -> bool:
    """Whether a process does not respond, but did so a moment before."""
    before = earlier.get((suspect.communicator.hash, suspect.member.rank))
    return suspect.member.state is MemberState.UNREACHABLE and before is not None and bool(before.launched)


def _members(snapshot: Snapshot) -> dict[tuple[str, int], Member]:
    return {(each.hash, member.rank): member for each in snapshot.communicators for member in each.members}


def _suspects(snapshot: Snapshot, world_size: int | None) -> list[_Suspect]:
    """All ranks of all communicators. A communicator of the whole job numbers its ranks as the job does."""
    rows = [(each, member) for each in snapshot.communicators for member in each.members]
    size = world_size or snapshot.process_count or len({member.process for _, member in rows})
    world = next((each for each in snapshot.communicators if each.size == size), None)
    ranks = {member.process: member.rank for member in (world.members if world else ()) if member.host}
    return [
        _Suspect(each, member, member.rank if each is world else ranks.get(member.process)) for each, member in rows
    ]


def _state_findings(suspects: Iterable[_Suspect], texts: Mapping[MemberState, _Texts]) -> list[Finding]:
    """A finding on the suspects in each of these states. An error because another rank failed does not count."""
    by_state: dict[MemberState, list[_Suspect]] = defaultdict(list)
    for each in suspects:
        if each.member.status.error != _REMOTE_ERROR:
            by_state[each.member.state].append(each)
    return [
        _finding(word, f"{_subject(by_state[state])} {title}", "", fix, by_state[state])
        for state, (word, title, fix) in texts.items()
        if by_state[state]
    ]


class _Lag(NamedTuple):
    """The ranks of a communicator with the lowest counts, the other ranks, and the counts that differ in words.

    If `is_mismatch`, no rank has launched all that others have, and `behind` are the ranks that differ from most.
    """

    behind: list[_Suspect]
    ahead: list[_Suspect]
    text: str
    is_mismatch: bool


def _stalled(
    suspects: Iterable[_Suspect], seconds: float, waiting: Collection[int], *, in_collective: bool
) -> Iterator[Finding]:
    """Yield why a job whose counts do not change hangs. A rank that is ahead in any communicator waits, too."""
    by_communicator: dict[str, list[_Suspect]] = defaultdict(list)
    for each in suspects:
        if each.member.launched:
            by_communicator[each.communicator.hash].append(each)
    complete = [members for members in by_communicator.values() if len(members) == members[0].communicator.size]
    lags = [lag for members in complete if (lag := _lag(members)) is not None]
    since = f"No count has changed for {seconds:.0f} s."
    excluded = {each.key for lag in lags for each in lag.ahead} | set(waiting)
    found = False
    for lag in lags:
        behind = [each for each in lag.behind if each.key not in excluded]
        excluded |= {each.key for each in behind}
        if behind:
            word, title, fix = _MISMATCH if lag.is_mismatch else _BEHIND
            yield _finding(word, f"{_subject(behind)} {title}", f"{lag.text} {since}", fix, behind)
        elif lag.is_mismatch:
            yield _finding("mismatch", "the ranks launched different collectives", f"{lag.text} {since}", MISMATCH_FIX)
        found |= bool(behind) or lag.is_mismatch
    if lags and not found:
        message = f"{lags[0].text} {since} The ranks with the lowest counts wait as well."
        yield _finding(
            "frozen", "the ranks launched different numbers of collectives, and none ends", message, _NETWORK_FIX
        )
    elif complete and in_collective and not lags:
        message = f"All ranks of each communicator launched equally many. {since} No rank is missing."
        title = "all ranks launched the same collectives, and the last ones do not end"
        yield _finding("frozen", title, message, _NETWORK_FIX)


def _lag(members: Sequence[_Suspect]) -> _Lag | None:
    """Compare the counts of all ranks of a communicator. None if they are equal."""
    names = sorted(set.intersection(*(set(each.member.launched) for each in members)))
    names = [name for name in names if len({each.member.launched[name] for each in members}) > 1]
    counts = {index: tuple(each.member.launched[name] for name in names) for index, each in enumerate(members)}
    if (odd := find_odd_ranks(counts)) is None:
        return None
    parts = []
    for count in sorted(set(counts.values()), key=sum)[:_MAX_SHOWN]:
        ranks = _subject([members[index] for index, actual in counts.items() if actual == count])
        parts.append(f"{ranks} launched {', '.join(f'{n} {name}' for n, name in zip(count, names, strict=True))}")
    most = max(counts.values(), key=sum)
    is_mismatch = any(n > limit for count in counts.values() for n, limit in zip(count, most, strict=True))
    least = min(map(sum, counts.values()))
    behind = odd.ranks if is_mismatch else [index for index, count in counts.items() if sum(count) == least]
    ahead = [] if is_mismatch else [each for index, each in enumerate(members) if index not in behind]
    return _Lag([members[index] for index in behind], ahead, f"{begun('; '.join(parts))}.", is_mismatch)


def _subject(suspects: Sequence[_Suspect]) -> str:
    """The ranks in words: "ranks 1-2", or "rank 1 of communicator 0x9e1799" if a rank in the job is not known."""
    ranks = {each.rank for each in suspects if each.rank is not None}
    if all(each.rank is not None for each in suspects):
        return ranks_text(sorted(ranks))
    return (
        f"{ranks_text(sorted({each.member.rank for each in suspects}))} of communicator {suspects[0].communicator.hash}"
    )


def _finding(word: str, title: str, message: str, fix: str, suspects: Sequence[_Suspect] = ()) -> Finding:
    """A finding on `suspects`, with their processes. Its ranks are those whose rank in the job is known."""
    ranks = tuple(sorted({each.rank for each in suspects if each.rank is not None}))
    places = {each.key: _process_text(each) for each in suspects if each.member.host}
    place = f"{begun(listed([*places.values()], _MAX_SHOWN))}." if places else ""
    severity = Severity.ERROR if ranks else Severity.WARNING
    message = f"{message} {place}".strip()
    return Finding(code=f"ras.{word}", severity=severity, title=title, message=message, fix=fix, ranks=ranks)


def _process_text(suspect: _Suspect) -> str:
    member = suspect.member
    error = f" (NCCL error {member.status.error})" if member.status.error else ""
    return f"{_subject([suspect])} is process {member.pid} on {member.host} with GPU {member.gpu}{error}"
