"""`ddpdiag train --compare-launchers`: options into data, turns into a report."""

import math
import os
import socket
import sys
import time
from collections.abc import Iterable
from tempfile import TemporaryDirectory

from ddpdiag.cli.check import launched
from ddpdiag.cli.options import LaunchOptions, spelled
from ddpdiag.cli.outputs import Outputs, counter, show, terminal
from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.render import files
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.strategies.command import refuse_nccl_without_gpus
from ddpdiag.strategies.launchers import render
from ddpdiag.strategies.launchers.judge import Seen, judged
from ddpdiag.strategies.launchers.model import Compare, LaunchersReport, Way
from ddpdiag.strategies.launchers.rounds import Rounds, typed
from ddpdiag.strategies.options import TrainOptions

# The options of `train` that mean the same here.
_OPTIONS = (
    *("compare_launchers", "rounds", "nproc_per_node", "steps", "batch_size", "backend", "budget", "data_dir"),
    *("json", "quiet", "color"),
)
# The first three steps are not timed, and a median of fewer than three says little.
_LEAST_STEPS, _MOST_STEPS = 6, 2_000
_MOST_IMAGES, _MOST_ROUNDS = 65_536, 20
_LEAST_BUDGET = 60.0
_AGAIN = "start `ddpdiag train --compare-launchers` once on the host, by itself"


def refuse_others(given: Iterable[str]) -> None:
    """UsageError for an option that has no meaning here; `given` are the names of those that were typed."""
    for name in given:
        if name not in _OPTIONS:
            raise UsageError(
                f"{spelled(name)} has no meaning with --compare-launchers, which trains with DistributedDataParallel "
                "on this host, started in each way: give only one of the two"
            )


def run(launch_options: LaunchOptions, options: TrainOptions, outputs: Outputs) -> int:
    """Start the training in each way, round after round; the exit code."""
    launch = launched(launch_options)
    refuse_launched(launch)
    compare = checked(options, len(launch.ranks))
    refuse_nccl_without_gpus(compare.backend)
    json = outputs.json
    if json is not None:
        files.check_writable(json)
    report = _measured(compare, launch.place.node, quiet=outputs.quiet)
    stream = sys.stderr if json == "-" else sys.stdout
    width, colored = terminal(stream, outputs.color)
    try:
        if json is not None:
            files.write(json, render.as_json(report))
    finally:  # a file that cannot be written shall not cost the table
        show(render.render(report, color=colored, width=width), stream)
    return report.exit_code


def refuse_launched(launch: Launch) -> None:
    """UsageError in a process that a launcher started: every rank would start all ranks, in every way."""
    place = launch.place
    if place.launcher == "standalone":
        return
    raise UsageError(
        f"--compare-launchers starts the ranks itself, in every way, and this process is rank {place.rank} of "
        f"{place.world_size} already (launcher: {place.launcher}): {_AGAIN}"
    )


def checked(options: TrainOptions, ranks: int) -> Compare:
    """What is compared, if it makes sense; UsageError otherwise. `ranks` are those that the launch came to."""
    _number("--steps", options.steps, _LEAST_STEPS, _MOST_STEPS)
    _number("--batch-size", options.batch_size, ranks, _MOST_IMAGES)
    _number("--rounds", options.rounds, 1, _MOST_ROUNDS)
    budget = options.budget
    if not math.isfinite(budget) or budget < _LEAST_BUDGET:
        raise UsageError(
            f"--budget {budget:g}: expected {_LEAST_BUDGET:g} s or more with --compare-launchers, which starts "
            f"{len(Way)} trainings one after the other"
        )
    if not options.backend.strip():
        raise UsageError("--backend: expected a name, such as nccl or gloo")
    if readable(options.backend) != options.backend:
        raise UsageError(f"--backend {readable(options.backend)}: it is no UTF-8, so no name of a backend")
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


def _number(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: expected {least} to {most:,} with --compare-launchers")


def _measured(compare: Compare, host: str, *, quiet: bool) -> LaunchersReport:
    begin = time.monotonic()
    signals = Signals(children=True)
    # Only this user may read it, and it is gone afterwards with all that launchers left in it.
    with (
        counter(quiet=quiet) as progress,
        TemporaryDirectory(prefix="ddpdiag-launchers-", ignore_cleanup_errors=True) as folder,
    ):
        rounds = Rounds(compare, folder, signals, lambda way, n: progress.tell(f"round {n + 1}: {way.value} ..."))
        rounds.run()
    seen = Seen(
        starts=tuple(rounds.starts),
        controls=tuple(rounds.controls),
        host=host,
        cores=len(os.sched_getaffinity(0)),
        seconds=time.monotonic() - begin,
        told=signals.told,
    )
    return judged(compare, seen, {way: typed(way, compare.ranks) for way in Way})
