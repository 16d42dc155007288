"""`ddpdiag train`: a run that only measures trainings by strategies. With --compare-launchers, start one training by
each launcher.
"""

import os
import sys
import time
from dataclasses import replace
from tempfile import TemporaryDirectory

from ddpdiag.cli import check
from ddpdiag.cli.check import check_backend, refuse_nccl_without_gpus
from ddpdiag.cli.options import CheckOptions
from ddpdiag.cli.outputs import Outputs, counter, show, terminal
from ddpdiag.codec import pretty
from ddpdiag.errors import UsageError
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import Train
from ddpdiag.render import files
from ddpdiag.render.page import Page
from ddpdiag.render.painter import paint
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.strategies.blocks import launcher_blocks
from ddpdiag.strategies.launchers import Training, judge
from ddpdiag.strategies.launching import Starts

# The checks of a run: membership and versions (LCH), cores, the trainings, and the events of the run (RUN).
CODES = ("LCH", "HST001", "TRN002", "RUN")


def run(launch: LaunchArgs, train: Train, options: CheckOptions, outputs: Outputs) -> int:
    """Run as a rank of a launched job, or start all ranks on this host; the exit code."""
    refuse_nccl_without_gpus(options.backend)
    return check.run(launch, replace(options, select=CODES, budget=train.budget), outputs, train=train)


# The first three steps are not timed, and a median of fewer than three is unreliable.
_LEAST_STEPS = 6
_LEAST_BUDGET = 60.0


def compare_launchers(launch_args: LaunchArgs, train: Train, options: CheckOptions, outputs: Outputs) -> int:
    """Start the training by each launcher, show the table, and write the JSON report if requested; the exit code."""
    launch = check.launched(launch_args)
    refuse_launched(launch)
    training = training_of(train, options, len(launch.ranks))
    json = outputs.json
    if json is not None:
        files.check_writable(json)
    begin = time.monotonic()
    signals = Signals(children=True)
    # Only this user may read the folder. It is removed afterwards with all files that launchers left in it.
    with (
        counter(quiet=outputs.quiet) as progress,
        TemporaryDirectory(prefix="ddpdiag-launchers-", ignore_cleanup_errors=True) as folder,
    ):
        starts = Starts(training, folder, signals, train.budget)
        starts.run(lambda method: progress.tell(f"{method.value} ..."))
    report = judge(
        training,
        starts.rows,
        host=launch.place.host,
        cores=len(os.sched_getaffinity(0)),
        seconds=time.monotonic() - begin,
        setting=starts.setting,
        stop_signal=signals.received,
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
    """Raise UsageError in a process that a launcher started, since every rank would start all ranks."""
    place = launch.place
    if place.launcher == "standalone":
        return
    raise UsageError(
        f"--compare-launchers starts the ranks itself, by each launcher, and this process is rank {place.rank} of "
        f"{place.world_size} already (launcher: {place.launcher}): start `ddpdiag train --compare-launchers` once on "
        "the host, by itself"
    )


def training_of(train: Train, options: CheckOptions, ranks: int) -> Training:
    """The training to start by each launcher on `ranks` ranks. UsageError for options that make no comparison."""
    for name, value, least in (
        ("--steps", train.steps, _LEAST_STEPS),
        ("--batch-size", train.batch_size, ranks),
        ("--budget", train.budget, _LEAST_BUDGET),
    ):
        if not value >= least:
            raise UsageError(f"{name} {value:g}: expected {least:g} or more with --compare-launchers")
    check_backend(options.backend)
    refuse_nccl_without_gpus(options.backend)
    return Training(ranks=ranks, steps=train.steps, batch_size=train.batch_size, backend=options.backend)
