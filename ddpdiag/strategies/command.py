"""`ddpdiag train`: a run whose only measurement is the training by strategies; with --compare-launchers one training,
started by each launcher, round after round.
"""

import math
import os
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from tempfile import TemporaryDirectory

from ddpdiag.cli import check
from ddpdiag.cli.check import refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckOptions, spelled, split
from ddpdiag.cli.outputs import Outputs, counter, show, terminal
from ddpdiag.codec import pretty, readable
from ddpdiag.errors import UsageError, nearest
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import Strategy, Train
from ddpdiag.render import files
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.strategies.blocks import launcher_blocks
from ddpdiag.strategies.launchers import Compare, LaunchMethod, judge
from ddpdiag.strategies.launching import Rounds
from ddpdiag.strategies.options import TrainOptions
from ddpdiag.strategies.trainings import BLOCKS, TOLERANCES

# Membership, versions, cores, the trainings, and what happened to the run.
CODES = ("LCH", "HST001", "TRN002", "RUN")
_MOST_STEPS, _MOST_IMAGES = 2_000, 65_536


def run(launch: LaunchArgs, options: TrainOptions, outputs: Outputs) -> int:
    """Take part in a training, or start one on this host; the exit code."""
    refuse_nccl_without_gpus(options.backend)
    run_options = CheckOptions(
        select=CODES, backend=options.backend, budget=options.budget, data_dir=options.data_dir, set_=options.set_
    )
    return check.run(launch, run_options, outputs, train=train_of(options))


def train_of(options: TrainOptions) -> Train:
    """The training that the options describe; UsageError for a value that makes no sense."""
    if options.dtype not in TOLERANCES:
        near = nearest(options.dtype, TOLERANCES)
        raise UsageError(f"--dtype {readable(options.dtype)}: expected {', '.join(TOLERANCES)}{near}")
    # Each once, in the order in which they were typed; "all" stands for all.
    names = dict.fromkeys(name.lower().replace("_", "-") for name in split(options.strategy))
    known = {strategy.value: strategy for strategy in Strategy}
    if "all" in names:
        names = dict.fromkeys([*known])
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"--strategy {readable(name)}: expected {', '.join(known)} or all{near}")
    return Train(
        strategies=tuple(known[name] for name in names),
        steps=_within("--steps", options.steps, 2, _MOST_STEPS),
        batch_size=_within("--batch-size", options.batch_size, 1, _MOST_IMAGES),
        group_size=_within("--group-size", options.group_size, 2, BLOCKS),
        dtype=options.dtype,
        scaling=options.scaling,
    )


def _within(option: str, value: int, least: int, most: int, *, context: str = "") -> int:
    """The value; UsageError if it is out of bounds."""
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: expected {least} to {most:,}{context}")
    return value


# --compare-launchers -------------------------------------------------------------------------------------------------


# The options of `train` that mean the same here.
_OPTIONS = (
    *("compare_launchers", "rounds", "nproc_per_node", "steps", "batch_size", "backend", "budget", "data_dir"),
    *("json", "quiet", "color"),
)
# The first three steps are not timed, and a median of fewer than three is unreliable.
_LEAST_STEPS = 6
_MOST_ROUNDS = 20
_LEAST_BUDGET = 60.0


def refuse_others(given: Iterable[str]) -> None:
    """UsageError for an option that has no meaning here; `given` are the names of those that were typed."""
    for name in given:
        if name not in _OPTIONS:
            raise UsageError(
                f"{spelled(name)} has no meaning with --compare-launchers, which trains with DistributedDataParallel "
                "on this host, started by each launcher: leave out one of the two"
            )


def compare_launchers(args: LaunchArgs, options: TrainOptions, outputs: Outputs) -> int:
    """Start the training by each launcher, round after round; the exit code."""
    launch = check.launched(args)
    refuse_launched(launch)
    compare = checked(options, len(launch.ranks))
    refuse_nccl_without_gpus(compare.backend)
    json = outputs.json
    if json is not None:
        files.check_writable(json)
    begin = time.monotonic()
    signals = Signals(children=True)
    # Only this user may read it, and it is removed afterwards with all files that launchers left in it.
    with (
        counter(quiet=outputs.quiet) as progress,
        TemporaryDirectory(prefix="ddpdiag-launchers-", ignore_cleanup_errors=True) as folder,
    ):
        rounds = Rounds(compare, folder, signals, lambda method, n: progress.tell(f"round {n + 1}: {method.value} ..."))
        rounds.run()
    report = judge(
        compare,
        rounds.starts,
        host=launch.place.host,
        cores=len(os.sched_getaffinity(0)),
        seconds=time.monotonic() - begin,
        stop_signal=signals.told,
    )
    stream = sys.stderr if json == "-" else sys.stdout
    width, colored = terminal(stream, outputs.color)
    try:
        if json is not None:
            files.write(json, pretty(report))
    finally:  # the table is shown even if the file cannot be written
        page = Page(color=colored, width=width)
        paint(page, launcher_blocks(report))
        show(page.text(), stream)
    return report.exit_code


def refuse_launched(launch: Launch) -> None:
    """UsageError in a process that a launcher started: every rank would start all ranks, by each launcher."""
    place = launch.place
    if place.launcher == "standalone":
        return
    raise UsageError(
        f"--compare-launchers starts the ranks itself, by each launcher, and this process is rank {place.rank} of "
        f"{place.world_size} already (launcher: {place.launcher}): start `ddpdiag train --compare-launchers` once on "
        "the host, by itself"
    )


def checked(options: TrainOptions, ranks: int) -> Compare:
    """The training to compare, if it makes sense; UsageError otherwise. `ranks` are those of the launch."""
    within = partial(_within, context=" with --compare-launchers")
    within("--steps", options.steps, _LEAST_STEPS, _MOST_STEPS)
    within("--batch-size", options.batch_size, ranks, _MOST_IMAGES)
    within("--rounds", options.rounds, 1, _MOST_ROUNDS)
    budget = options.budget
    if not math.isfinite(budget) or budget < _LEAST_BUDGET:
        raise UsageError(
            f"--budget {budget:g}: expected {_LEAST_BUDGET:g} s or more with --compare-launchers, which starts "
            f"{len(LaunchMethod)} trainings one after the other"
        )
    if not options.backend.strip():
        raise UsageError("--backend: expected a name, such as nccl or gloo")
    if readable(options.backend) != options.backend:
        raise UsageError(f"--backend {readable(options.backend)}: not UTF-8, so not the name of a backend")
    if options.data_dir is not None and not os.path.isdir(options.data_dir):
        raise UsageError(f"--data-dir {readable(options.data_dir)}: no such directory on {socket.gethostname()}")
    return Compare(
        ranks=ranks,
        steps=options.steps,
        batch_size=options.batch_size,
        rounds=options.rounds,
        backend=options.backend.strip().lower(),
        data_dir=None if options.data_dir is None else os.path.abspath(options.data_dir),
        budget_seconds=budget,
    )
