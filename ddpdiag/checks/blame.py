"""The ranks that stopped a group, from the outcomes of all its ranks.

The rank that reports an error is seldom the one at fault: survivors of a crash print "Connection closed by peer", and
in a hang all ranks wait.

Collectives of several ranks are compared: which rank posted a different one than most, and which posted fewer. A
collective's number within its group is the same on all ranks, so that equal numbers must mean equal calls. Only
numbers, names and sizes count: the state of a collective in a flight recorder cannot be trusted.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from ddpdiag.checks import known_errors
from ddpdiag.checks.posted import Lag, in_words, lag, split
from ddpdiag.errors import AbsentBackend
from ddpdiag.model import FORK_STEP, IMPORT_STEP, Collective, Outcome, Status, Trial
from ddpdiag.model.trial import BARRIER_STEP, COMMUNICATOR_STEP, is_first_use
from ddpdiag.stats import odd_ones_out

# Texts of gloo, NCCL and c10d's store by which a rank reports the end of another one (torch 2.6-2.15), beside those of
# the cards of echoes. In a log some of these name the cause, or a rank that is missing; here all ranks are known.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
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
    # Watchdogs of both classes of process groups for NCCL, which abort a rank that waited for too long.
    "Watchdog caught collective operation timeout",
    "timeout watchdog detected operation",
    # Of two ranks that post different sizes, the one with the smaller buffer reports it, whichever is wrong.
    "data size doesn't match expected size",
    "Detected mismatch between collectives",
)
# The error of a GPU's program after its peer's memory was freed with the peer's process (legacy CUDA IPC).
_OF_LOST_MEMORY = "illegal memory access"
# The files of torch.distributed in which a rank is that waits in one of its calls.
_INSIDE = ("(distributed_c10d.py", "(c10d_logger.py", "(rendezvous.py")
# The end of a step in which a rank waits for what it has posted.
_WAITS = ": wait"
# A rank whose last step was announced within this share of the deadline before its end was not stuck.
_MOVING_SHARE = 0.05
# A communicator of 25 s is slow and works (libraries on a file server, many adapters); see also FIRST_USE_SECONDS.
_SLOW_FIRST_USE_SECONDS = 30.0


class Blame(Struct, frozen=True, kw_only=True):
    """The blamed ranks and how they failed, with the deciding evidence; no ranks when it cannot decide.

    `sides` holds what the ranks posted under the same number, if that was not the same (their paths through the code
    differ, or their shapes): an example of each kind with its ranks, the most common one last.
    """

    status: Status
    ranks: tuple[int, ...]
    why: str
    sides: tuple[tuple[Collective, tuple[int, ...]], ...] = ()


def is_echo(outcome: Outcome) -> bool:
    """Whether this rank failed only because another one did."""
    if outcome.told:
        return True
    if outcome.status is Status.RAISED:
        return _echoes(outcome.error)
    # NCCL's watchdog aborts the process of a rank whose peer has ended; any other signal is a failure of its own.
    aborted = "SIGABRT" in outcome.error and _echoes(outcome.detail)
    return outcome.status is Status.DIED and (aborted or _echoes(outcome.error))


def _echoes(text: str) -> bool:
    return any(echo in text for echo in ECHOES) or known_errors.is_echo(text)


@dataclass(frozen=True)
class _Case:
    """The outcomes of a group that failed, of which `members` is the size, and what the rules derive from them.

    `cause` says why messages between the ranks do not arrive, if that is known.
    """

    failed: Sequence[Outcome]
    members: int
    cause: str = ""

    @cached_property
    def hung(self) -> list[Outcome]:
        return [o for o in self.failed if o.status is Status.HUNG]

    @cached_property
    def front(self) -> int:
        return front(self.hung)

    @cached_property
    def frames(self) -> dict[int, str]:
        """The innermost frame of each hung rank, as far as it is known."""
        return {o.rank: _frame(o) for o in self.hung if o.process and o.process.stack}

    @cached_property
    def lag(self) -> Lag:
        return lag({o.rank: o.collectives for o in self.hung if o.collectives is not None})

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Hung ranks that wait for others: beyond the common step, or inside of torch.distributed."""
        inside = {rank for rank, frame in self.frames.items() if frame.endswith(_INSIDE)}
        return frozenset(inside | {o.rank for o in self.hung if o.step > self.front or _waits(o)})

    @cached_property
    def frames_ahead(self) -> set[str]:
        """The frames of ranks that lack no collective. One that lacks some and is there as well waits for a message."""
        return {frame for rank, frame in self.frames.items() if rank not in self.lag.ranks}

    def hung_blame(self, ranks: Iterable[int], why: str) -> Blame:
        return Blame(status=Status.HUNG, ranks=tuple(sorted(ranks)), why=why)


def blamed(outcomes: Sequence[Outcome], cause: str = "") -> Blame | None:
    """Ranks that stopped a group, by the first of `_RULES` that decides; None if no rank failed.

    `cause` says why messages between the ranks do not arrive, if that is known: then where a rank waits proves nothing.
    """
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    if not failed:
        return None
    case = _Case(failed, len(outcomes), cause)
    return next(blame for rule in _RULES if (blame := rule(case)) is not None)


def _failed_by_themselves(case: _Case) -> Blame | None:
    """A rank that sent no result explains all others; a crash explains the hangs around it, and so does an error."""
    victims = _victims(case.failed)
    for status, why in (
        (Status.UNHEARD, "it sent no result"),
        (Status.DIED, "its process ended"),
        (Status.RAISED, "it failed with an error of its own"),
    ):
        guilty = _ranks(o for o in case.failed if o.status is status and not is_echo(o) and o.rank not in victims)
        if len(guilty) == case.members > 1:
            if status is Status.UNHEARD:
                return Blame(status=status, ranks=(), why="none of them sent a result")
            if len({o.error.partition("\n")[0] for o in case.failed}) == 1:
                return Blame(status=status, ranks=(), why="all ranks failed with the same error")
        if guilty:
            return Blame(status=status, ranks=guilty, why=why)
    return None


def _mismatch(case: _Case) -> Blame | None:
    """The ranks that posted a different collective than most; without a majority no rank is blamed."""
    found = split({o.rank: o.collectives for o in case.failed if o.collectives})
    if found is None:
        return None
    usual = in_words(found.sides[-1][0])
    odd = next((collective for collective, ranks in found.sides if set(ranks) & set(found.odd)), None)
    why = f"it posted {in_words(odd)}; most posted {usual}" if odd else "the ranks posted different collectives"
    status = next(o.status for o in case.failed if not found.odd or o.rank in found.odd)
    return Blame(status=status, ranks=found.odd, why=why, sides=found.sides)


def _echoes_only(case: _Case) -> Blame | None:
    if case.hung:
        return None
    why = case.cause or "every rank reports that another one failed"
    return Blame(status=case.failed[0].status, ranks=(), why=why)


def _stopped(case: _Case) -> Blame | None:
    for letters, why in (("Tt", "its process is stopped"), ("D", "its process is stuck in the kernel or a driver")):
        if guilty := _ranks(o for o in case.hung if o.process and o.process.state and o.process.state in letters):
            return case.hung_blame(guilty, why)
    return None


def _alone(case: _Case) -> Blame | None:
    is_alone = case.members == 1 or (len(case.hung) == 1 and not case.cause)
    guilty = _ranks(o for o in case.hung if is_alone and not o.told)
    return case.hung_blame(guilty, "only it did not end") if guilty else None


def _known_cause(case: _Case) -> Blame | None:
    return case.hung_blame((), case.cause) if case.cause else None


def _short_of_the_step(case: _Case) -> Blame | None:
    guilty = _ranks(o for o in case.hung if o.step < case.front and not _waits(o))
    return case.hung_blame(guilty, "it did not reach the step at which the others wait for it") if guilty else None


def _absent_from_the_first_call(case: _Case) -> Blame | None:
    """Ranks outside of torch.distributed while others wait inside of it, if no rank has posted anything.

    The older class of NCCL's groups creates its communicator in the first collective, before it is recorded, so that a
    rank that never calls it and those that wait for it have posted equally much. Once something was posted, a rank may
    as well wait for it outside, in a call of CUDA.
    """
    frames = case.frames
    if len(frames) < len(case.hung) or any(o.collectives is None or o.collectives for o in case.hung):
        return None
    guilty = _ranks(o for o in case.hung if not frames[o.rank].endswith(_INSIDE) and not o.told)
    if not guilty or not any(frame.endswith(_INSIDE) for frame in frames.values()):
        return None
    return case.hung_blame(guilty, "it is not in a call of torch.distributed; the others are")


def _posted_fewer(case: _Case) -> Blame | None:
    behind, lacking = case.lag
    told = {o.rank for o in case.hung if o.told}  # earlier than it would have hung by itself
    guilty = {rank for rank in behind if case.frames.get(rank) not in case.frames_ahead} - told - case.waiting
    if not guilty or lacking is None:
        return None
    return case.hung_blame(guilty, f"it did not post {in_words(lacking)}, in which the others wait for it")


def _elsewhere(case: _Case) -> Blame | None:
    odd = odd_ones_out(case.frames)
    guilty = {*odd.ranks} - case.waiting if odd is not None else ()
    return case.hung_blame(guilty, "it is at another place in the code than the others") if guilty else None


def _lone_death(case: _Case) -> Blame | None:
    died = _ranks(o for o in case.failed if o.status is Status.DIED)
    if len(died) != 1 or not all(o.told for o in case.hung):
        return None
    why = "only its process ended by itself; the others were ended after it"
    return Blame(status=Status.DIED, ranks=died, why=why)


def _undecided(case: _Case) -> Blame:
    if case.lag.lacking is not None:
        lacking = in_words(case.lag.lacking)
        return case.hung_blame((), f"all ranks wait, but not all of them in {lacking} yet: a message did not arrive")
    if all(o.at == COMMUNICATOR_STEP for o in case.hung):
        return case.hung_blame((), "all ranks hang while they create their communicator")
    return case.hung_blame((), "all ranks are at the same step")


# The first one that decides counts.
_RULES: tuple[Callable[[_Case], Blame | None], ...] = (
    _failed_by_themselves,
    _mismatch,
    _echoes_only,
    _stopped,
    _alone,
    _known_cause,
    _short_of_the_step,
    _absent_from_the_first_call,
    _posted_fewer,
    _elsewhere,
    _lone_death,
    _undecided,
)


def _victims(failed: Sequence[Outcome]) -> frozenset[int]:
    """Ranks that lost memory which a peer had shared with them, as the peer's process ended before.

    It crashed, or it hung until its deadline, at which it was killed.
    """
    lost = [o for o in failed if _OF_LOST_MEMORY in (f"{o.error}{o.detail}" if o.status is Status.DIED else o.error)]
    ranks = {o.rank for o in lost}
    gone = [o for o in failed if o.rank not in ranks and o.status in (Status.DIED, Status.HUNG) and not o.told]
    killed_seconds = min((o.seconds for o in gone if o.status is Status.HUNG), default=math.inf)
    crashed = any(o.status is Status.DIED and not is_echo(o) for o in gone)
    return frozenset(o.rank for o in lost if crashed or o.seconds >= killed_seconds)


# Texts of errors that come from the backend, or from what carries its messages.
_OF_BACKENDS = ("NCCL", "CUDA", "DistBackendError", "system error", "imed out", "imeout")


def stopped_by_themselves(outcomes: Sequence[Outcome], backend: str) -> tuple[int, ...]:
    """Ranks that stopped a collective, however messages travel, so that no variable of the backend helps; else ().

    They raised an error that is none of the backend's, exited or were killed by SIGKILL, posted another collective than
    most or none, or are stopped. That a rank is short of the others' step proves nothing here: a collective that fails
    in the backend may end on some ranks.
    """
    case = _Case([o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)], len(outcomes))
    if mismatch := _mismatch(case):
        return mismatch.ranks or tuple(sorted(rank for _, ranks in mismatch.sides for rank in ranks))
    texts = (*_OF_BACKENDS, backend)
    if ended := _ranks(
        o
        for o in case.failed
        if not is_echo(o)
        and (
            (o.status is Status.RAISED and not any(text in o.error for text in texts))
            or (o.status is Status.DIED and ("exit code" in o.error or "SIGKILL" in o.error))
        )
    ):
        return ended
    if stopped := _ranks(o for o in case.hung if not o.told and o.process and (o.process.state or "") in ("T", "t")):
        return stopped
    frames = case.frames
    elsewhere = tuple(rank for rank in case.lag.ranks if rank in frames and frames[rank] not in case.frames_ahead)
    absent = _absent_from_the_first_call(case)
    return elsewhere or (absent.ranks if absent is not None else ())


def without_backend(outcomes: Iterable[Outcome]) -> dict[int, str]:
    """Ranks whose torch does not have the backend, with the error text."""
    said = ((outcome.rank, *outcome.error.partition(": ")) for outcome in outcomes)
    return {rank: text for rank, name, _, text in said if name == AbsentBackend.__name__}


def unfinished(trial: Trial, blame: Blame, outcomes: Sequence[Outcome], *, patient: bool = False) -> bool:
    """Whether a blamed rank (any rank, if none is blamed) was still making progress at its deadline: it did not hang.

    It had taken a step shortly before; or it used a core, in the imports (which may take minutes) or in a trial
    that the budget gave less time than usual; or the budget left less for its first use of GPU and NCCL than that takes
    on slow hosts. `patient`: a rank that was given less time than usual counts as making
    progress in any case, unless it is stopped, or stuck in the kernel.
    """
    if blame.status is not Status.HUNG or blame.sides:
        return False
    suspects = [o for o in outcomes if not blame.ranks or o.rank in blame.ranks]
    return any(goes_on(o, trial, patient=patient) for o in suspects if o.status is Status.HUNG and not o.told)


def goes_on(outcome: Outcome, trial: Trial, *, patient: bool = False) -> bool:
    """Whether this rank was still making progress at its deadline."""
    process = outcome.process
    if process is None or (process.state or "") in "TtD":
        return False
    since = process.step_seconds
    moving = since is not None and outcome.step > 1 and since < _MOVING_SHARE * trial.deadline_seconds
    waiting = patient and trial.hurried
    busy = process.busy and (trial.hurried or outcome.at in (IMPORT_STEP, FORK_STEP))
    return moving or waiting or busy or is_starting(outcome, trial)


def is_starting(outcome: Outcome, trial: Trial) -> bool:
    """Whether the rank was in its first use of GPU or NCCL, for which the budget left less than slow hosts need."""
    has_first_use = trial.params.get("backend") != "gloo" and (trial.first_use_seconds > 0 or trial.hurried)
    in_first_use = has_first_use and is_first_use(outcome.at) and outcome.at != BARRIER_STEP
    return in_first_use and trial.limit_seconds < _SLOW_FIRST_USE_SECONDS


def _waits(outcome: Outcome) -> bool:
    """Whether a rank waits in a collective for messages of others, which is never its own fault."""
    return outcome.at.endswith(_WAITS) or (_frame(outcome).endswith(_INSIDE) and bool(outcome.collectives))


def front(outcomes: Sequence[Outcome]) -> int:
    """The step that most ranks had reached; of several, the highest."""
    counts = Counter(o.step for o in outcomes)
    return max(counts, key=lambda step: (counts[step], step))


def _frame(outcome: Outcome) -> str:
    """Innermost frame without its line number: waiting ranks differ in lines of a retry loop."""
    frame = outcome.process.stack[0] if outcome.process and outcome.process.stack else ""
    return os.path.basename(frame.rpartition(":")[0])


def _ranks(outcomes: Iterable[Outcome]) -> tuple[int, ...]:
    return tuple(sorted(o.rank for o in outcomes))
