"""Blame for a failed trial: the ranks that stopped their group, decided from the outcomes of all ranks in the group.

The rank that reports an error is seldom at fault: after a crash the other ranks print "Connection closed by peer", and
in a hang all ranks wait.

One kind of evidence is the collectives that ranks posted. A rank may have posted a different collective than most
ranks, or fewer. Each rank numbers the collectives of a process group, and ranks must post equal calls under equal
numbers. Only numbers, names and sizes are compared, because a flight recorder's state of a collective is unreliable.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from ddpdiag.checks import known_errors
from ddpdiag.errors import AbsentBackend
from ddpdiag.evidence.collectives import Lag, collective_text, find_lag, first_mismatch
from ddpdiag.model import FORK_STEP, IMPORT_STEP, Collective, Outcome, Status, Trial
from ddpdiag.model.trial import BARRIER_STEP, COMMUNICATOR_STEP, is_first_use
from ddpdiag.stats import find_odd_ranks

# Texts by which gloo, NCCL and c10d's store report that another rank ended (torch 2.6-2.15), in addition to the cards
# with Role.ECHO. In a log some of these texts may show a cause, but in a trial the outcomes of all ranks are known.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Connect timeout",
    "timed out connecting",
    # The text of gloo for each failure to connect, until torch 2.6.
    "] no error",
    "Timed out waiting",
    "wait timeout after",
    "Wait timeout",
    "Socket Timeout",
    "client socket has timed out",
    "clients joined",
    "failed to recv, got 0 bytes",
    "Failed to recv, got 0 bytes",
    # torch has two classes of NCCL process groups. The watchdogs of both abort a rank that waited too long.
    "Watchdog caught collective operation timeout",
    "timeout watchdog detected operation",
    # If two ranks post different sizes, the rank with the smaller buffer reports this, even if the other is wrong.
    "data size doesn't match expected size",
    "Detected mismatch between collectives",
)
# The error of a GPU kernel that uses a peer's memory after the peer's process has ended (legacy CUDA IPC).
_LOST_MEMORY_TEXT = "illegal memory access"
# If a rank waits in a call of torch.distributed, its innermost frame is in one of these files.
_C10D_FILES = ("(distributed_c10d.py", "(c10d_logger.py", "(rendezvous.py")
# The end of the name of a step in which a rank waits for a collective that it has posted.
_WAIT_SUFFIX = ": wait"
# A rank was still making progress if it announced a step in the last part of its deadline, which is this share.
_RECENT_STEP_SHARE = 0.05
# Creating a communicator that works may take 25 s (libraries on a file server, many adapters); see FIRST_USE_SECONDS.
_SLOW_FIRST_USE_SECONDS = 30.0


class Blame(Struct, frozen=True, kw_only=True):
    """The blamed ranks (empty: the evidence cannot decide), how they failed (`status`), and the evidence (`why`).

    `variants` is set if ranks posted different collectives under the same number, because they ran other code or had
    other shapes. It holds one example of each collective with the ranks that posted it, the most common last.
    """

    status: Status
    ranks: tuple[int, ...]
    why: str
    variants: tuple[tuple[Collective, tuple[int, ...]], ...] = ()


def is_echo(outcome: Outcome) -> bool:
    """Whether the rank failed only because another rank failed."""
    if outcome.interrupted:
        return True
    if outcome.status is Status.RAISED:
        return contains_echo(outcome.error)
    # NCCL's watchdog aborts the process of a rank whose peer has ended. Any other signal is this rank's failure.
    aborted = "SIGABRT" in outcome.error and contains_echo(outcome.detail)
    return outcome.status is Status.DIED and (aborted or contains_echo(outcome.error))


def contains_echo(text: str) -> bool:
    """Whether `text` has an error that shows only that another rank ended."""
    return any(echo in text for echo in ECHOES) or known_errors.is_echo(text)


@dataclass(frozen=True)
class _Case:
    """The failed outcomes of a group of `group_size` ranks, and facts derived from them, which the rules of blame use.

    `cause` says why messages between the ranks do not arrive; empty if this is not known.
    """

    failed: Sequence[Outcome]
    group_size: int
    cause: str = ""

    @cached_property
    def hung(self) -> list[Outcome]:
        return [o for o in self.failed if o.status is Status.HUNG]

    @cached_property
    def usual_step(self) -> int:
        return usual_step(self.hung)

    @cached_property
    def frames(self) -> dict[int, str]:
        """The innermost stack frame, by rank, of the hung ranks whose stack is known."""
        return {o.rank: _inner_frame(o) for o in self.hung if o.process and o.process.stack}

    @cached_property
    def lag(self) -> Lag:
        return find_lag({o.rank: o.collectives for o in self.hung if o.collectives is not None})

    @cached_property
    def waiting(self) -> frozenset[int]:
        """The hung ranks that wait for others: they are past the step of most ranks, or wait in torch.distributed."""
        inside = {rank for rank, frame in self.frames.items() if frame.endswith(_C10D_FILES)}
        return frozenset(inside | {o.rank for o in self.hung if o.step_count > self.usual_step or _is_waiting(o)})

    @cached_property
    def waiting_frames(self) -> set[str]:
        """The frames of ranks that posted all collectives. Any rank in such a frame waits for a message."""
        return {frame for rank, frame in self.frames.items() if rank not in self.lag.ranks}

    def blame_hung(self, ranks: Iterable[int], why: str) -> Blame:
        return Blame(status=Status.HUNG, ranks=tuple(sorted(ranks)), why=why)


def find_blame(outcomes: Sequence[Outcome], cause: str = "") -> Blame | None:
    """Find the ranks that stopped a group, by the first of `_RULES` that returns a blame; None if no rank failed.

    `cause` says why messages between the ranks do not arrive (empty: not known). Given a cause, steps prove nothing.
    """
    failed = [o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)]
    if not failed:
        return None
    case = _Case(failed, len(outcomes), cause)
    return next(blame for rule in _RULES if (blame := rule(case)) is not None)


def _blame_own_failures(case: _Case) -> Blame | None:
    """Blame the ranks that sent no result; else those that crashed; else those with an error that is no echo."""
    victims = _victims(case.failed)
    for status, why in (
        (Status.UNHEARD, "it sent no result"),
        (Status.DIED, "its process ended"),
        (Status.RAISED, "it failed with an error of its own"),
    ):
        guilty = _ranks(o for o in case.failed if o.status is status and not is_echo(o) and o.rank not in victims)
        if len(guilty) == case.group_size > 1:
            if status is Status.UNHEARD:
                return Blame(status=status, ranks=(), why="none of them sent a result")
            if len({o.error.partition("\n")[0] for o in case.failed}) == 1:
                return Blame(status=status, ranks=(), why="all ranks failed with the same error")
        if guilty:
            return Blame(status=status, ranks=guilty, why=why)
    return None


def _blame_mismatch(case: _Case) -> Blame | None:
    """Blame the ranks that posted a different collective than most, or no rank if there is no majority."""
    found = first_mismatch({o.rank: o.collectives for o in case.failed if o.collectives})
    if found is None:
        return None
    usual = collective_text(found.variants[-1][0])
    odd = next((collective for collective, ranks in found.variants if set(ranks) & set(found.minority)), None)
    why = f"it posted {collective_text(odd)}; most posted {usual}" if odd else "the ranks posted different collectives"
    status = next(o.status for o in case.failed if not found.minority or o.rank in found.minority)
    return Blame(status=status, ranks=found.minority, why=why, variants=found.variants)


def _blame_none_for_echoes(case: _Case) -> Blame | None:
    if case.hung:
        return None
    why = case.cause or "every rank reports that another one failed"
    return Blame(status=case.failed[0].status, ranks=(), why=why)


def _blame_stopped(case: _Case) -> Blame | None:
    for letters, why in (("Tt", "its process is stopped"), ("D", "its process is stuck in the kernel or a driver")):
        if guilty := _ranks(o for o in case.hung if o.process and o.process.state and o.process.state in letters):
            return case.blame_hung(guilty, why)
    return None


def _blame_only_hung(case: _Case) -> Blame | None:
    is_alone = case.group_size == 1 or (len(case.hung) == 1 and not case.cause)
    guilty = _ranks(o for o in case.hung if is_alone and not o.interrupted)
    return case.blame_hung(guilty, "only it did not end") if guilty else None


def _blame_none_for_cause(case: _Case) -> Blame | None:
    return case.blame_hung((), case.cause) if case.cause else None


def _blame_short_of_step(case: _Case) -> Blame | None:
    guilty = _ranks(o for o in case.hung if o.step_count < case.usual_step and not _is_waiting(o))
    return case.blame_hung(guilty, "it did not reach the step at which the others wait for it") if guilty else None


def _blame_absent_from_first_call(case: _Case) -> Blame | None:
    """Blame ranks outside of torch.distributed while others wait inside it, if no rank has posted a collective.

    The older class of NCCL process groups creates its communicator in the first collective, before this is recorded. So
    a rank that never calls the first collective has posted none, like the ranks that wait in it. The rule does not hold
    for later collectives, because a rank may then wait in a call of CUDA, outside of torch.distributed.
    """
    frames = case.frames
    if len(frames) < len(case.hung) or any(o.collectives is None or o.collectives for o in case.hung):
        return None
    guilty = _ranks(o for o in case.hung if not frames[o.rank].endswith(_C10D_FILES) and not o.interrupted)
    if not guilty or not any(frame.endswith(_C10D_FILES) for frame in frames.values()):
        return None
    return case.blame_hung(guilty, "it is not in a call of torch.distributed; the others are")


def _blame_fewer_posted(case: _Case) -> Blame | None:
    behind, lacking = case.lag
    ended = {o.rank for o in case.hung if o.interrupted}  # by rank 0, before their deadline
    guilty = {rank for rank in behind if case.frames.get(rank) not in case.waiting_frames} - ended - case.waiting
    if not guilty or lacking is None:
        return None
    return case.blame_hung(guilty, f"it did not post {collective_text(lacking)}, in which the others wait for it")


def _blame_other_frame(case: _Case) -> Blame | None:
    odd = find_odd_ranks(case.frames)
    guilty = {*odd.ranks} - case.waiting if odd is not None else ()
    return case.blame_hung(guilty, "it is at another place in the code than the others") if guilty else None


def _blame_only_death(case: _Case) -> Blame | None:
    died = _ranks(o for o in case.failed if o.status is Status.DIED)
    if len(died) != 1 or not all(o.interrupted for o in case.hung):
        return None
    why = "only its process ended by itself; the others were ended after it"
    return Blame(status=Status.DIED, ranks=died, why=why)


def _blame_none(case: _Case) -> Blame:
    if case.lag.first_missing is not None:
        lacking = collective_text(case.lag.first_missing)
        return case.blame_hung((), f"all ranks wait, but not all of them in {lacking} yet: a message did not arrive")
    if all(o.last_step == COMMUNICATOR_STEP for o in case.hung):
        return case.blame_hung((), "all ranks hang while they create their communicator")
    return case.blame_hung((), "all ranks are at the same step")


# The first rule that returns a blame decides.
_RULES: tuple[Callable[[_Case], Blame | None], ...] = (
    _blame_own_failures,
    _blame_mismatch,
    _blame_none_for_echoes,
    _blame_stopped,
    _blame_only_hung,
    _blame_none_for_cause,
    _blame_short_of_step,
    _blame_absent_from_first_call,
    _blame_fewer_posted,
    _blame_other_frame,
    _blame_only_death,
    _blame_none,
)


def _victims(failed: Sequence[Outcome]) -> frozenset[int]:
    """Return the ranks that failed because they used the memory of a peer whose process had ended.

    The peer crashed, or it hung and was killed at its deadline.
    """
    lost = [o for o in failed if _LOST_MEMORY_TEXT in (f"{o.error}{o.detail}" if o.status is Status.DIED else o.error)]
    ranks = {o.rank for o in lost}
    gone = [o for o in failed if o.rank not in ranks and o.status in (Status.DIED, Status.HUNG) and not o.interrupted]
    killed_seconds = min((o.seconds for o in gone if o.status is Status.HUNG), default=math.inf)
    crashed = any(o.status is Status.DIED and not is_echo(o) for o in gone)
    return frozenset(o.rank for o in lost if crashed or o.seconds >= killed_seconds)


# Texts of errors of the backend, or of the operating system's network calls that it uses.
_BACKEND_TEXTS = ("NCCL", "CUDA", "DistBackendError", "system error", "imed out", "imeout")


def ranks_failed_outside_backend(outcomes: Sequence[Outcome], backend: str) -> tuple[int, ...]:
    """Return the ranks that stopped a collective for a reason that no variable of the backend can change.

    These ranks raised an error that is not the backend's, exited, were killed by SIGKILL, are stopped, posted no
    collective, or posted another collective than most (without a majority: all ranks). Not having reached the step of
    the others is no such reason, because a collective that fails in the backend may end on some ranks only.
    """
    case = _Case([o for o in outcomes if o.status not in (Status.DONE, Status.SKIPPED)], len(outcomes))
    if mismatch := _blame_mismatch(case):
        return mismatch.ranks or tuple(sorted(rank for _, ranks in mismatch.variants for rank in ranks))
    texts = (*_BACKEND_TEXTS, backend)
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
    elsewhere = tuple(rank for rank in case.lag.ranks if rank in frames and frames[rank] not in case.waiting_frames)
    absent = _blame_absent_from_first_call(case)
    return elsewhere or (absent.ranks if absent is not None else ())


def missing_backend_errors(outcomes: Iterable[Outcome]) -> dict[int, str]:
    """Return the error text of each rank whose torch was built without the backend."""
    errors = ((outcome.rank, *outcome.error.partition(": ")) for outcome in outcomes)
    return {rank: text for rank, name, _, text in errors if name == AbsentBackend.__name__}


def is_unfinished(trial: Trial, blame: Blame, outcomes: Sequence[Outcome], *, lenient: bool = False) -> bool:
    """Whether a blamed rank (any rank, if none is blamed) was still making progress at its deadline, so did not hang.

    Such a rank announced a step shortly before. Or it used a core during the imports (which may take minutes) or in a
    trial whose deadline the budget had shortened. Or the budget left less for its first use of GPU and NCCL than slow
    hosts need. With `lenient`, a shortened deadline is enough, unless the rank is stopped or stuck in the kernel.
    """
    if blame.status is not Status.HUNG or blame.variants:
        return False
    hung = [o for o in outcomes if o.status is Status.HUNG and not o.interrupted]
    return any(is_progressing(o, trial, lenient=lenient) for o in hung if not blame.ranks or o.rank in blame.ranks)


def is_progressing(outcome: Outcome, trial: Trial, *, lenient: bool = False) -> bool:
    """Whether the rank was still making progress at its deadline, by the rules of `is_unfinished`."""
    process = outcome.process
    if process is None or (process.state or "") in "TtD":
        return False
    seconds = process.step_seconds
    moving = seconds is not None and outcome.step_count > 1 and seconds < _RECENT_STEP_SHARE * trial.deadline_seconds
    is_excused = lenient and trial.is_shortened
    busy = process.busy and (trial.is_shortened or outcome.last_step in (IMPORT_STEP, FORK_STEP))
    return moving or is_excused or busy or is_starting(outcome, trial)


def is_starting(outcome: Outcome, trial: Trial) -> bool:
    """Whether the rank was in its first use of GPU or NCCL, and had less time for this than slow hosts need."""
    has_first_use = trial.params.get("backend") != "gloo" and (trial.first_use_seconds > 0 or trial.is_shortened)
    in_first_use = has_first_use and is_first_use(outcome.last_step) and outcome.last_step != BARRIER_STEP
    return in_first_use and trial.limit_seconds < _SLOW_FIRST_USE_SECONDS


def _is_waiting(outcome: Outcome) -> bool:
    """Whether the rank waits in a collective for messages of other ranks, so the hang is not its fault."""
    is_in_call = _inner_frame(outcome).endswith(_C10D_FILES) and bool(outcome.collectives)
    return outcome.last_step.endswith(_WAIT_SUFFIX) or is_in_call


def usual_step(outcomes: Sequence[Outcome]) -> int:
    """Return the most common number of a rank's last step; of several equally common ones the highest."""
    counts = Counter(o.step_count for o in outcomes)
    return max(counts, key=lambda step: (counts[step], step))


def _inner_frame(outcome: Outcome) -> str:
    """Return the innermost frame without its line, since waiting ranks are at different lines of a retry loop."""
    frame = outcome.process.stack[0] if outcome.process and outcome.process.stack else ""
    return os.path.basename(frame.rpartition(":")[0])


def _ranks(outcomes: Iterable[Outcome]) -> tuple[int, ...]:
    return tuple(sorted(o.rank for o in outcomes))
