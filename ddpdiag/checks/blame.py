"""The ranks that stopped their group, decided from the outcomes of all ranks in it.

The rank that reports an error is seldom the one at fault: survivors of a crash print "Connection closed by peer", and
in a hang all ranks wait.

The collectives that ranks posted are compared: a rank may have posted a different one than most, or fewer. Each rank
counts the collectives of a group, so that ranks must post equal calls under equal numbers. Only numbers, names and
sizes are compared, because the state of a collective in a flight recorder cannot be trusted.
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
from ddpdiag.stats import find_odd_ranks

# Texts by which gloo, NCCL and c10d's store report that another rank ended (torch 2.6-2.15), in addition to the cards
# with Role.ECHO. In a log some of them name a cause or a missing rank, but here the outcomes of all ranks are known.
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
    # The watchdogs of both classes of NCCL process groups abort a rank that waited too long.
    "Watchdog caught collective operation timeout",
    "timeout watchdog detected operation",
    # If two ranks post different sizes, the rank with the smaller buffer reports this, even if the other is wrong.
    "data size doesn't match expected size",
    "Detected mismatch between collectives",
)
# The error of a GPU kernel that uses a peer's memory after the peer's process has ended (legacy CUDA IPC).
_OF_LOST_MEMORY = "illegal memory access"
# A rank that waits in a call of torch.distributed has its innermost frame in one of these files.
_INSIDE = ("(distributed_c10d.py", "(c10d_logger.py", "(rendezvous.py")
# The name of a step in which a rank waits for a collective that it has posted ends with this.
_WAITS = ": wait"
# A rank that announced a step within this last share of its deadline was still making progress.
_MOVING_SHARE = 0.05
# A communicator may take 25 s and still work (libraries on a file server, many adapters); see FIRST_USE_SECONDS.
_SLOW_FIRST_USE_SECONDS = 30.0


class Blame(Struct, frozen=True, kw_only=True):
    """The blamed ranks, how they failed (`status`), and the deciding evidence (`why`). No ranks: it cannot decide.

    `sides` is set if ranks posted different collectives under the same number (another path through the code, or other
    shapes): one example of each with the ranks that posted it, the most common one last.
    """

    status: Status
    ranks: tuple[int, ...]
    why: str
    sides: tuple[tuple[Collective, tuple[int, ...]], ...] = ()


def is_echo(outcome: Outcome) -> bool:
    """Whether this rank failed only because another rank failed."""
    if outcome.interrupted:
        return True
    if outcome.status is Status.RAISED:
        return _echoes(outcome.error)
    # NCCL's watchdog aborts the process of a rank whose peer has ended. Any other signal is this rank's failure.
    aborted = "SIGABRT" in outcome.error and _echoes(outcome.detail)
    return outcome.status is Status.DIED and (aborted or _echoes(outcome.error))


def _echoes(text: str) -> bool:
    return any(echo in text for echo in ECHOES) or known_errors.is_echo(text)


@dataclass(frozen=True)
class _Case:
    """The failed outcomes of a group of `members` ranks, and the facts that the rules of blame derive from them.

    `cause` says why messages between the ranks do not arrive; empty if not known.
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
        """The innermost frame of each hung rank whose stack is known."""
        return {o.rank: _frame(o) for o in self.hung if o.process and o.process.stack}

    @cached_property
    def lag(self) -> Lag:
        return lag({o.rank: o.collectives for o in self.hung if o.collectives is not None})

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Hung ranks that wait for other ranks: they passed the step of most ranks, or wait in torch.distributed."""
        inside = {rank for rank, frame in self.frames.items() if frame.endswith(_INSIDE)}
        return frozenset(inside | {o.rank for o in self.hung if o.step_count > self.front or _waits(o)})

    @cached_property
    def frames_ahead(self) -> set[str]:
        """Frames of ranks that lack no collective. A rank that lacks one but is in such a frame waits for a message."""
        return {frame for rank, frame in self.frames.items() if rank not in self.lag.ranks}

    def hung_blame(self, ranks: Iterable[int], why: str) -> Blame:
        return Blame(status=Status.HUNG, ranks=tuple(sorted(ranks)), why=why)


def blamed(outcomes: Sequence[Outcome], cause: str = "") -> Blame | None:
    """The ranks that stopped a group, by the first of `_RULES` that returns a blame; None if no rank failed.

    `cause` says why messages between the ranks do not arrive (empty: not known). Then a rank's position proves nothing.
    """
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    if not failed:
        return None
    case = _Case(failed, len(outcomes), cause)
    return next(blame for rule in _RULES if (blame := rule(case)) is not None)


def _failed_by_themselves(case: _Case) -> Blame | None:
    """Blame the ranks that sent no result, else those that crashed, else those with an error of their own."""
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
    """Blame the ranks that posted a different collective than most, or no rank if there is no majority."""
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
    guilty = _ranks(o for o in case.hung if is_alone and not o.interrupted)
    return case.hung_blame(guilty, "only it did not end") if guilty else None


def _known_cause(case: _Case) -> Blame | None:
    return case.hung_blame((), case.cause) if case.cause else None


def _short_of_the_step(case: _Case) -> Blame | None:
    guilty = _ranks(o for o in case.hung if o.step_count < case.front and not _waits(o))
    return case.hung_blame(guilty, "it did not reach the step at which the others wait for it") if guilty else None


def _absent_from_the_first_call(case: _Case) -> Blame | None:
    """Blame ranks outside of torch.distributed while others wait inside of it, if no rank has posted a collective.

    The older class of NCCL groups creates its communicator in the first collective, before that is recorded. So a rank
    that never calls this collective has posted as many as the ranks that wait for it: none. After the first collective,
    a rank may also wait outside of torch.distributed, in a call of CUDA.
    """
    frames = case.frames
    if len(frames) < len(case.hung) or any(o.collectives is None or o.collectives for o in case.hung):
        return None
    guilty = _ranks(o for o in case.hung if not frames[o.rank].endswith(_INSIDE) and not o.interrupted)
    if not guilty or not any(frame.endswith(_INSIDE) for frame in frames.values()):
        return None
    return case.hung_blame(guilty, "it is not in a call of torch.distributed; the others are")


def _posted_fewer(case: _Case) -> Blame | None:
    behind, lacking = case.lag
    ended = {o.rank for o in case.hung if o.interrupted}  # by rank 0, before their deadline
    guilty = {rank for rank in behind if case.frames.get(rank) not in case.frames_ahead} - ended - case.waiting
    if not guilty or lacking is None:
        return None
    return case.hung_blame(guilty, f"it did not post {in_words(lacking)}, in which the others wait for it")


def _elsewhere(case: _Case) -> Blame | None:
    odd = find_odd_ranks(case.frames)
    guilty = {*odd.ranks} - case.waiting if odd is not None else ()
    return case.hung_blame(guilty, "it is at another place in the code than the others") if guilty else None


def _lone_death(case: _Case) -> Blame | None:
    died = _ranks(o for o in case.failed if o.status is Status.DIED)
    if len(died) != 1 or not all(o.interrupted for o in case.hung):
        return None
    why = "only its process ended by itself; the others were ended after it"
    return Blame(status=Status.DIED, ranks=died, why=why)


def _undecided(case: _Case) -> Blame:
    if case.lag.lacking is not None:
        lacking = in_words(case.lag.lacking)
        return case.hung_blame((), f"all ranks wait, but not all of them in {lacking} yet: a message did not arrive")
    if all(o.last_step == COMMUNICATOR_STEP for o in case.hung):
        return case.hung_blame((), "all ranks hang while they create their communicator")
    return case.hung_blame((), "all ranks are at the same step")


# The first rule that returns a blame decides.
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
    """Ranks that failed because a peer's process ended and its memory, which they shared, was freed.

    The peer crashed, or it hung and was killed at its deadline.
    """
    lost = [o for o in failed if _OF_LOST_MEMORY in (f"{o.error}{o.detail}" if o.status is Status.DIED else o.error)]
    ranks = {o.rank for o in lost}
    gone = [o for o in failed if o.rank not in ranks and o.status in (Status.DIED, Status.HUNG) and not o.interrupted]
    killed_seconds = min((o.seconds for o in gone if o.status is Status.HUNG), default=math.inf)
    crashed = any(o.status is Status.DIED and not is_echo(o) for o in gone)
    return frozenset(o.rank for o in lost if crashed or o.seconds >= killed_seconds)


# Texts of errors of the backend, or of the system below it that carries its messages.
_OF_BACKENDS = ("NCCL", "CUDA", "DistBackendError", "system error", "imed out", "imeout")


def stopped_by_themselves(outcomes: Sequence[Outcome], backend: str) -> tuple[int, ...]:
    """Ranks that stopped a collective for a reason that no variable of the backend can change; empty if none did.

    They raised an error that is not the backend's, exited, were killed by SIGKILL, posted another collective than most
    (all ranks if there is no majority) or none, or are stopped. A rank that did not reach the step of the others is not
    among them for that reason alone, because a collective that fails in the backend may end on some ranks.
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
    if stopped := _ranks(
        o for o in case.hung if not o.interrupted and o.process and (o.process.state or "") in ("T", "t")
    ):
        return stopped
    frames = case.frames
    elsewhere = tuple(rank for rank in case.lag.ranks if rank in frames and frames[rank] not in case.frames_ahead)
    absent = _absent_from_the_first_call(case)
    return elsewhere or (absent.ranks if absent is not None else ())


def without_backend(outcomes: Iterable[Outcome]) -> dict[int, str]:
    """The error text of each rank whose torch lacks the backend."""
    errors = ((outcome.rank, *outcome.error.partition(": ")) for outcome in outcomes)
    return {rank: text for rank, name, _, text in errors if name == AbsentBackend.__name__}


def unfinished(trial: Trial, blame: Blame, outcomes: Sequence[Outcome], *, patient: bool = False) -> bool:
    """Whether a blamed rank (any rank, if none is blamed) was still making progress at its deadline: it did not hang.

    Such a rank announced a step shortly before. Or it used a core during the imports (which may take minutes) or in a
    trial whose deadline the budget had shortened. Or the budget left less for its first use of GPU and NCCL than slow
    hosts need. With `patient`, a shortened deadline is enough, unless the rank is stopped or stuck in the kernel.
    """
    if blame.status is not Status.HUNG or blame.sides:
        return False
    suspects = [o for o in outcomes if not blame.ranks or o.rank in blame.ranks]
    return any(goes_on(o, trial, patient=patient) for o in suspects if o.status is Status.HUNG and not o.interrupted)


def goes_on(outcome: Outcome, trial: Trial, *, patient: bool = False) -> bool:
    """Whether the rank was still making progress at its deadline, by the rules of `unfinished`."""
    process = outcome.process
    if process is None or (process.state or "") in "TtD":
        return False
    since = process.step_seconds
    moving = since is not None and outcome.step_count > 1 and since < _MOVING_SHARE * trial.deadline_seconds
    waiting = patient and trial.is_shortened
    busy = process.busy and (trial.is_shortened or outcome.last_step in (IMPORT_STEP, FORK_STEP))
    return moving or waiting or busy or is_starting(outcome, trial)


def is_starting(outcome: Outcome, trial: Trial) -> bool:
    """Whether the rank was in its first use of GPU or NCCL, with less time for it than slow hosts need."""
    has_first_use = trial.params.get("backend") != "gloo" and (trial.first_use_seconds > 0 or trial.is_shortened)
    in_first_use = has_first_use and is_first_use(outcome.last_step) and outcome.last_step != BARRIER_STEP
    return in_first_use and trial.limit_seconds < _SLOW_FIRST_USE_SECONDS


def _waits(outcome: Outcome) -> bool:
    """Whether the rank waits in a collective for messages of other ranks, so that the hang is not its fault."""
    return outcome.last_step.endswith(_WAITS) or (_frame(outcome).endswith(_INSIDE) and bool(outcome.collectives))


def front(outcomes: Sequence[Outcome]) -> int:
    """The most common number of a rank's last step; the highest if several are equally common."""
    counts = Counter(o.step_count for o in outcomes)
    return max(counts, key=lambda step: (counts[step], step))


def _frame(outcome: Outcome) -> str:
    """The innermost frame without its line number, because waiting ranks are at different lines of a retry loop."""
    frame = outcome.process.stack[0] if outcome.process and outcome.process.stack else ""
    return os.path.basename(frame.rpartition(":")[0])


def _ranks(outcomes: Iterable[Outcome]) -> tuple[int, ...]:
    return tuple(sorted(o.rank for o in outcomes))
