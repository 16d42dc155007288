"""The trainings of TRN002: their ranks, the data of a rank, the outcome of each, and its deviation from single."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.blame import Blame, blamed, unfinished, without_backend
from ddpdiag.checks.hosts import ranks_text
from ddpdiag.checks.world import World
from ddpdiag.model import Options, Outcome, Status, Trial
from ddpdiag.model.train import BLOCKS, Ended, Strategy, Train


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial. `not_possible` is what this torch lacks; then nothing was trained.

    `losses` are the mean loss over the `images` that this rank saw in a step; `parts` (of single alone) those of each
    rank's share of the images. `start` is the SHA-256 of the first weights. `seconds` are those of `timed_steps`.
    """

    device: str
    not_possible: str = ""
    start: str = ""
    end: str = ""
    losses: tuple[float, ...] = ()
    parts: tuple[tuple[float, ...], ...] = ()
    images: int = 0
    timed_steps: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    state_bytes: int | None = None


def asked_of(options: Options) -> Train:
    """The options of `ddpdiag train`; the defaults for a check that was selected by its code."""
    return options.train if options.train is not None else Train()


# As in the task; tensor-parallel cuts it evenly.
_HIDDEN = 128


def strategies_of(world: World) -> tuple[Strategy, ...]:
    """The trainings in their order: single first, for the comparison; empty where no requested one is possible."""
    asked = asked_of(world.options).strategy
    if all(why_not(each, world) for each in asked):
        return ()
    return tuple(each for each in dict.fromkeys((Strategy.SINGLE, *asked)) if not why_not(each, world))


def ranks_of(strategy: Strategy, world: World) -> tuple[int, ...]:
    """The ranks that train by a strategy; none where it is not possible here."""
    if why_not(strategy, world):
        return ()
    match strategy:
        case Strategy.SINGLE | Strategy.DP:
            return world.living[:1]
        case Strategy.PIPELINE:
            return world.living[:BLOCKS]
        case Strategy.MODEL_PARALLEL if world.backend == "nccl":
            return _with_own_devices(world)
        case _:
            return world.living


def batch_of(world: World) -> int:
    """The images of a step: the requested number, and at least one for each rank."""
    return max(asked_of(world.options).batch_size, world.size)


def hidden_of(world: World) -> int:
    """The width of the last layers: a multiple of the ranks, for tensor-parallel to cut."""
    return math.ceil(_HIDDEN / world.size) * world.size


def trial_of(seen: Seen[Data], strategy: Strategy) -> Trial | None:
    """The trial of a strategy, if there was one."""
    return next((trial for trial in seen.trials if trial.params["strategy"] == strategy.value), None)


def devices_of(strategy: Strategy, world: World) -> int:
    """The number of devices on which a strategy computes."""
    ranks = ranks_of(strategy, world)
    match strategy:
        case Strategy.DP:
            return world.arrivals[ranks[0]].gpus
        case Strategy.MODEL_PARALLEL if world.backend == "nccl":
            return len(ranks) * asked_of(world.options).group_size
        case _:
            return len(ranks)


def _with_own_devices(world: World) -> tuple[int, ...]:
    """On each host, as many ranks as it has groups of GPUs."""
    groups = {rank: world.arrivals[rank].gpus // asked_of(world.options).group_size for rank in world.living}
    return tuple(rank for rank in world.living if (world.places[rank].local_rank or 0) < groups[rank])


def why_not(strategy: Strategy, world: World) -> str | None:
    """The reason why a strategy is not possible here, or None."""
    match strategy:
        case Strategy.DP:
            if world.backend != "nccl":
                return f"it copies the network to GPUs, and over {world.backend} ranks train on the CPU"
            gpus = world.arrivals[world.living[0]].gpus if world.living else 0
            return None if gpus > 1 else f"one process needs 2 GPUs or more, and rank {world.living[0]} sees {gpus}"
        case Strategy.MODEL_PARALLEL if world.backend == "nccl" and not _with_own_devices(world):
            most = max((arrival.gpus for arrival in world.arrivals.values()), default=0)
            least = asked_of(world.options).group_size
            return f"a rank needs {least} GPUs (--group-size), and no rank sees more than {most}"
        case Strategy.SINGLE | Strategy.MODEL_PARALLEL:
            return None
        case _:
            return "it needs 2 ranks or more, and there is one" if world.size == 1 else None


# Their outcomes ------------------------------------------------------------------------------------------------------


# In nats, where the loss begins at ln 10 = 2.3. Sums in another order differ by the last bits: the largest deviations
# that were measured, of all strategies over 200 steps on a CPU, are a fifth of these or less.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}


def tolerance_of(seen: Seen[Data]) -> float:
    """The largest deviation of a loss from that of single that still counts as equal."""
    return seen.number("tolerance", TOLERANCES[asked_of(seen.options).dtype])


class Apart(NamedTuple):
    """The largest deviation of losses from those of single, and the first step beyond the tolerance (None: none)."""

    most: float
    step: int | None = None


class Run(NamedTuple):
    """One training by a strategy. `blame` is there if it failed, `apart` if it was compared."""

    strategy: Strategy
    batch: int
    trial: Trial
    data: Mapping[int, Data]
    outcomes: Sequence[Outcome]
    ended: Ended
    reason: str = ""
    blame: Blame | None = None
    apart: Apart | None = None

    @property
    def rate(self) -> float | None:
        """Images per second of all ranks; they wait for each other, so the slowest sets the time."""
        seconds = max((own.seconds for own in self.data.values()), default=0.0)
        if self.ended not in (Ended.WORKS, Ended.WRONG, Ended.NOT_COMPARED) or seconds <= 0:
            return None
        return self.batch * next(iter(self.data.values())).timed_steps / seconds


def run_of(seen: Seen[Data], strategy: Strategy) -> Run | None:
    """The training by a strategy with its outcome; None if there was none."""
    if (trial := trial_of(seen, strategy)) is None:
        return None
    data = {row.place.rank: row.data for row in seen.rows if row.trial.number == trial.number}
    outcomes = [outcome for outcome in seen.outcomes if outcome.trial == trial.number]
    run = Run(strategy, int(trial.params["batch"]), trial, data, outcomes, Ended.WORKS)
    return _compared(seen, _ended(seen, run))


def runs(seen: Seen[Data]) -> tuple[Run, ...]:
    """All trainings, in the order in which they were tried."""
    found = (run_of(seen, Strategy(trial.params["strategy"])) for trial in seen.trials)
    return tuple(run for run in found if run is not None)


def _ended(seen: Seen[Data], run: Run) -> Run:
    lacks = [own.not_possible for own in run.data.values() if own.not_possible]
    if lacks := lacks or [*without_backend(run.outcomes).values()]:
        return run._replace(ended=Ended.NOT_POSSIBLE, reason="; ".join(dict.fromkeys(lacks)))
    if why := _why_ended_early(seen, run):
        return run._replace(ended=Ended.UNFINISHED, reason=why)
    blame = blamed(run.outcomes)
    if blame is None:
        return run
    if unfinished(run.trial, blame, run.outcomes):
        still = next(o for o in run.outcomes if o.status is Status.HUNG)
        reason = f"it was still making progress after {run.trial.deadline_seconds:.1f} s, at '{still.at}'"
        return run._replace(ended=Ended.UNFINISHED, reason=reason, blame=blame)
    if blame.status is Status.HUNG:
        return run._replace(ended=Ended.HANGS, reason=blame.why, blame=blame)
    # The error of the first rank that failed by itself.
    failed = [o for o in run.outcomes if o.status is blame.status and (not blame.ranks or o.rank in blame.ranks)]
    reason = next((o.error.splitlines()[0] for o in failed if o.error), blame.why)
    return run._replace(ended=Ended.FAILS, reason=reason, blame=blame)


def _why_ended_early(seen: Seen[Data], run: Run) -> str:
    """The reason of the run, not of the training, for which it ended early; empty if there is none."""
    lost = [o.rank for o in run.outcomes if o.status is Status.UNHEARD and o.rank in seen.world.out]
    if lost:
        return f"{ranks_text(lost)} left the run before the training ended"
    reported = {outcome.rank for outcome in run.outcomes if outcome.status is not Status.SKIPPED}
    if not reported.issuperset(run.trial.ranks):
        return "the run ended before the training did"
    hurried = next((o for o in run.outcomes if o.status is Status.HUNG and run.trial.hurried and not o.told), None)
    if hurried is not None:
        return f"the budget left {run.trial.deadline_seconds:.1f} s for it, after which it was at '{hurried.at}'"
    return ""


# The loss ------------------------------------------------------------------------------------------------------------


def _compared(seen: Seen[Data], run: Run) -> Run:
    """The same run, compared with single; single itself need only be finite."""
    if run.ended is not Ended.WORKS:
        return run
    losses = mean_losses(run)
    if not losses or not all(map(math.isfinite, losses)):
        bad = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        reason = f"its loss is {losses[bad : bad + 1]}"
        return run._replace(ended=Ended.WRONG, apart=Apart(math.inf, bad), reason=reason)
    if run.strategy is Strategy.SINGLE:
        return run
    alone = reference(seen)
    if alone is None:
        return run._replace(ended=Ended.NOT_COMPARED, reason="single gave no losses to compare with")
    apart = compare(run, alone, tolerance_of(seen))
    if apart.step is None:
        return run._replace(apart=apart)
    return run._replace(
        ended=Ended.WRONG, apart=apart, reason=f"its loss differs from that of single by {apart.most:.2g}"
    )


def reference(seen: Seen[Data]) -> Data | None:
    """The data of single, if it trained."""
    trial = trial_of(seen, Strategy.SINGLE)
    found = (row.data for row in seen.rows if trial is not None and row.trial.number == trial.number)
    return next((data for data in found if data.losses and all(map(math.isfinite, data.losses))), None)


def mean_losses(run: Run) -> tuple[float, ...]:
    """The loss of each step over all images: that of each rank counts as much as the images that it saw."""
    trained = [data for data in run.data.values() if data.losses]
    images = sum(data.images for data in trained)
    steps = range(min((len(data.losses) for data in trained), default=0))
    return tuple(sum(data.losses[step] * data.images for data in trained) / images for step in steps)


def compare(run: Run, alone: Data, tolerance: float) -> Apart:
    """The losses of all ranks together, and each rank's own where single shows what they should be.

    Errors of two ranks may cancel in the mean. The rank whose own loss is off first is not to blame: with wrong
    parameters on all ranks, that depends on their images.
    """
    compared = [zip(mean_losses(run), alone.losses, strict=False)]
    compared += [zip(run.data[rank].losses, _expected(run, rank, alone), strict=False) for rank in run.data]
    offs = [[abs(loss - right) for loss, right in pairs] for pairs in compared]
    # A comparison with NaN is never true.
    late = [step for own in offs for step, off in enumerate(own) if not off <= tolerance]
    return Apart(max((off for own in offs for off in own), default=math.inf), min(late, default=None))


def _expected(run: Run, rank: int, alone: Data) -> tuple[float, ...]:
    """The losses that this rank should have, or nothing where single does not show them."""
    own = run.data[rank]
    if own.images == run.batch:
        return alone.losses
    place = run.trial.group_of(rank).index(rank)
    ranks = len(run.trial.ranks)
    if not own.losses or not alone.parts or len(alone.parts[0]) != ranks:
        return ()
    return tuple(part[place] for part in alone.parts)
