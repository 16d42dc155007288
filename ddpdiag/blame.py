"""Who stopped a group, from what every rank left behind. Pure.

The rank that complains is seldom the guilty one: survivors of a crash print "Connection closed by peer", and in a hang
everybody waits.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ddpdiag.model import Outcome, Status
from ddpdiag.stats import odd_ones_out

# Texts of gloo, NCCL and c10d's store by which a rank reports somebody else's end (torch 2.6-2.15).
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Connect timeout",
    "timed out connecting",
    "Timed out waiting",
    "wait timeout after",
    "Wait timeout",
    "Socket Timeout",
    "client socket has timed out",
    "clients joined",
    "failed to recv, got 0 bytes",
    "Failed to recv, got 0 bytes",
    "ncclRemoteError",
    "remote process exited",
)


class Blame(Struct, frozen=True, kw_only=True):
    """The guilty ranks and how they failed, with the deciding evidence; no ranks when it cannot decide."""

    status: Status
    ranks: tuple[int, ...]
    why: str


def is_echo(outcome: Outcome) -> bool:
    """Did this rank fail only because another one did?"""
    if outcome.told:
        return True
    if outcome.status is Status.RAISED:
        return _echoes(outcome.error)
    # NCCL's watchdog aborts the process of a rank whose peer has gone; any other signal is an end of its own.
    aborted = "SIGABRT" in outcome.error and _echoes(outcome.detail)
    return outcome.status is Status.DIED and (aborted or _echoes(outcome.error))


def _echoes(text: str) -> bool:
    return any(echo in text for echo in ECHOES)


def blamed(outcomes: Sequence[Outcome]) -> Blame | None:
    """Ranks that stopped a group; None if nobody failed.

    A rank that never reported explains all others; a crash explains the hangs around it, and so does a failure of its
    own; among the hung, the guilty are the stopped, then those stuck in the kernel, then those short of the step that
    most ranks reached, then the one that stands elsewhere in the code.
    """
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    if not failed:
        return None
    for status, why in (
        (Status.UNHEARD, "nothing was heard of it"),
        (Status.DIED, "its process ended"),
        (Status.RAISED, "it failed by itself"),
    ):
        guilty = _ranks(o for o in failed if o.status is status and not is_echo(o))
        if status is Status.UNHEARD and len(guilty) == len(outcomes) > 1:
            return Blame(status=status, ranks=(), why="nothing was heard of any of them")
        if guilty:
            return Blame(status=status, ranks=guilty, why=why)
    hung = [o for o in failed if o.status is Status.HUNG]
    if not hung:
        return Blame(status=failed[0].status, ranks=(), why="every rank reports that somebody else failed")
    blame = _among_hung(hung, len(outcomes))
    died = _ranks(o for o in failed if o.status is Status.DIED)
    if not blame.ranks and len(died) == 1 and all(o.told for o in hung):
        return Blame(status=Status.DIED, ranks=died, why="only its process ended, and the others were told to stop")
    return blame


def _among_hung(hung: Sequence[Outcome], members: int) -> Blame:
    if members == 1 or len(hung) == 1:
        own = _ranks(o for o in hung if not o.told)
        return Blame(status=Status.HUNG, ranks=own, why="only it did not end" if own else "it was told to stop")
    for letters, why in (("Tt", "its process is stopped"), ("D", "its process is stuck in the kernel or a driver")):
        if guilty := _ranks(o for o in hung if o.process and o.process.state and o.process.state in letters):
            return Blame(status=Status.HUNG, ranks=guilty, why=why)
    if guilty := _short(hung):
        return Blame(status=Status.HUNG, ranks=guilty, why="it did not reach the step at which the others wait for it")
    odd = odd_ones_out({o.rank: _where(o) for o in hung if o.process and o.process.stack})
    if odd is not None and odd.ranks:
        return Blame(status=Status.HUNG, ranks=odd.ranks, why="it stands elsewhere in the code than the others")
    return Blame(status=Status.HUNG, ranks=(), why="all ranks stand at the same step")


def front(outcomes: Sequence[Outcome]) -> int:
    """The step that most ranks had reached; of several, the highest."""
    counts = Counter(o.step for o in outcomes)
    return max(counts, key=lambda step: (counts[step], step))


def _short(hung: Sequence[Outcome]) -> tuple[int, ...]:
    reached = front(hung)
    return _ranks(o for o in hung if o.step < reached)


def _where(outcome: Outcome) -> str:
    """Innermost frame without its line number: waiting ranks differ in lines of a retry loop."""
    frame = outcome.process.stack[0] if outcome.process else ""
    return os.path.basename(frame.rpartition(":")[0])


def _ranks(outcomes: Iterable[Outcome]) -> tuple[int, ...]:
    return tuple(sorted(o.rank for o in outcomes))
