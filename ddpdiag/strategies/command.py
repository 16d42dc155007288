"""`ddpdiag train`: run the check TRN002, which trains by several strategies, and the checks that it needs. With
--compare-launchers, start one training by each launcher instead."""

import os
import sys
import time
from dataclasses import replace
from tempfile import TemporaryDirectory

from ddpdiag.cli import check
from ddpdiag.cli.check import check_backend, refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckArgs
from ddpdiag.cli.outputs import Outputs, progress_line, show, terminal_style
from ddpdiag.codec import indented_json
from ddpdiag.errors import UsageError
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import TrainRequest
from ddpdiag.render import files
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.runtime.launchers import read_own_launch
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.strategies.blocks import launcher_blocks
from ddpdiag.strategies.launchers import Training, judge
from ddpdiag.strategies.launching import LauncherComparison

# The checks of a run: membership and versions (LCH), cores, the trainings, and the events of the run (RUN).
CODES = ("LCH", "HST001", "TRN002", "RUN")


def run(launch: LaunchArgs, train: TrainRequest, options: CheckArgs, outputs: Outputs) -> int:
    """Run this process as a rank if a launcher started it, else start all ranks here. Returns the exit code."""
    refuse_nccl_without_gpus(options.backend)
    return check.run(launch, replace(options, select=CODES, budget=train.budget), outputs, train=train)


# The first three steps are not timed, and a median of fewer than three timed steps is unreliable.
_MIN_STEPS = 6
_MIN_BUDGET_SECONDS = 60.0


def compare_launchers(launch_args: LaunchArgs, train: TrainRequest, options: CheckArgs, outputs: Outputs) -> int:
    """Start one training by each launcher, show the table, and write JSON if requested. Returns the exit code."""
    launch = read_own_launch(launch_args)
    refuse_launched(launch)
    training = training_to_compare(train, options, len(launch.ranks))
    json = outputs.json
    if json is not None:
        files.check_writable(json)
    began_at = time.monotonic()
    signals = Signals(children=True)
    # Only this user may read the folder. It is removed afterwards with all files that launchers left in it.
    with (
        progress_line(quiet=outputs.quiet) as progress,
        TemporaryDirectory(prefix="ddpdiag-launchers-", ignore_cleanup_errors=True) as folder,
    ):
        comparison = LauncherComparison(training, folder, signals, train.budget)
        comparison.run(lambda method: progress.tell(f"{method.value} ..."))
    report = judge(
        training,
        comparison.rows,
        host=launch.place.host,
        cores=len(os.sched_getaffinity(0)),
        seconds=time.monotonic() - began_at,
        setting=comparison.setting,
        stop_signal=signals.received,
    )
    stream = sys.stderr if json == "-" else sys.stdout
    width, colored = terminal_style(stream, outputs.color)
    try:
        if json is not None:
            files.write(json, indented_json(report))
    finally:  # the table is shown even if the file cannot be written
        page = Page(color=colored, width=width)
        paint(page, launcher_blocks(report))
        show(page.text(), stream)
    return report.exit_code


def refuse_launched(launch: Launch) -> None:
    """Raise UsageError if a launcher started this process, because then every rank would start all ranks."""
    place = launch.place
    if place.launcher != "standalone":
        raise UsageError(
            f"--compare-launchers starts the ranks itself, by each launcher, and this process is rank {place.rank} of "
            f"{place.world_size} already (launcher: {place.launcher}): start `ddpdiag train --compare-launchers` once "
            "on the host, by itself"
        )


def training_to_compare(train: TrainRequest, options: CheckArgs, ranks: int) -> Training:
    """The training that each launcher starts with `ranks` ranks. UsageError if the options do not suit a comparison."""
    for name, value, minimum in (
        ("--steps", train.steps, _MIN_STEPS),
        ("--batch-size", train.batch_size, ranks),
        ("--budget", train.budget, _MIN_BUDGET_SECONDS),
    ):
        if not value >= minimum:
            raise UsageError(f"{name} {value:g}: expected {minimum:g} or more with --compare-launchers")
    check_backend(options.backend)
    refuse_nccl_without_gpus(options.backend)
    return Training(ranks=ranks, steps=train.steps, batch_size=train.batch_size, backend=options.backend)
