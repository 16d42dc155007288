"""`ddpdiag train --compare-launchers`: options into data, turns into a report."""

import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable

from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import counter, show, terminal
from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement.launching import Seen, judged
from ddpdiag.model.launching import Compare, LaunchersReport, Way
from ddpdiag.probes.gpus import visible_gpus
from ddpdiag.probes.procfs import proc_root
from ddpdiag.render import files, launching
from ddpdiag.runtime.environment import read_launch
from ddpdiag.runtime.launchers import Asked, Launch
from ddpdiag.runtime.rounds import Rounds, installed
from ddpdiag.runtime.signals import Signals
from ddpdiag.runtime.ways import typed
from ddpdiag.strategies.command import refuse_nccl_without_gpus

# The options of `train` that mean the same here.
OPTIONS = (
    "compare_launchers",
    "rounds",
    "nproc_per_node",
    "steps",
    "batch_size",
    "backend",
    "budget",
    "data_dir",
    "json",
    "quiet",
    "color",
)
# The first three steps are not timed, and a median of fewer than three says little.
_LEAST_STEPS, _MOST_STEPS = 6, 2_000
_MOST_IMAGES, _MOST_ROUNDS = 65_536, 20
_LEAST_BUDGET = 60.0
_AGAIN = "start `ddpdiag train --compare-launchers` once on the host, by itself"


def refuse_others(given: Iterable[str]) -> None:
    """UsageError for an option that has no meaning here; `given` are the names of those that were typed."""
    for name in given:
        if name not in OPTIONS:
            option = "--" + name.rstrip("_").replace("_", "-")
            raise UsageError(
                f"{option} has no meaning with --compare-launchers, which trains with DistributedDataParallel on this "
                "host, started in each way: give only one of the two"
            )


def run(asked: Asked, compare: Compare, json: str | None, *, quiet: bool, color: Color) -> int:
    """Start the training in each way, round after round; the exit code."""
    launch = read_launch(
        os.environ,
        asked,
        host=readable(socket.gethostname()),
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        cores=os.cpu_count() or 1,
        fresh=secrets.token_hex(6),
    )
    refuse_launched(launch)
    compare = checked(compare, len(launch.ranks))
    refuse_nccl_without_gpus(compare.backend)
    if json is not None:
        files.check_writable(json)
    report = _measured(compare, launch.place.node, quiet=quiet)
    stream = sys.stderr if json == "-" else sys.stdout
    width, colored = terminal(stream, color)
    try:
        if json is not None:
            files.write(json, launching.as_json(report))
    finally:  # a file that cannot be written shall not cost the table
        show(launching.render(report, color=colored, width=width), stream)
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


def checked(compare: Compare, ranks: int) -> Compare:
    """The numbers, if they make sense; UsageError otherwise. `ranks` are those that the launch came to."""
    _number("--steps", compare.steps, _LEAST_STEPS, _MOST_STEPS)
    _number("--batch-size", compare.batch_size, ranks, _MOST_IMAGES)
    _number("--rounds", compare.rounds, 1, _MOST_ROUNDS)
    budget = compare.budget_seconds
    if not math.isfinite(budget) or budget < _LEAST_BUDGET:
        raise UsageError(
            f"--budget {budget:g}: expected {_LEAST_BUDGET:g} s or more with --compare-launchers, which starts "
            f"{len(Way)} trainings one after the other"
        )
    if not compare.backend.strip():
        raise UsageError("--backend: expected a name, such as nccl or gloo")
    if readable(compare.backend) != compare.backend:
        raise UsageError(f"--backend {readable(compare.backend)}: it is no UTF-8, so no name of a backend")
    if compare.data_dir is not None and not os.path.isdir(compare.data_dir):
        raise UsageError(f"--data-dir {readable(compare.data_dir)}: no such directory on {socket.gethostname()}")
    return Compare(
        ranks=ranks,
        steps=compare.steps,
        batch_size=compare.batch_size,
        rounds=compare.rounds,
        backend=compare.backend.strip().lower(),
        data_dir=None if compare.data_dir is None else os.path.abspath(compare.data_dir),
        budget_seconds=budget,
    )


def _number(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: expected {least} to {most:,} with --compare-launchers")


def _measured(compare: Compare, host: str, *, quiet: bool) -> LaunchersReport:
    begin = time.monotonic()
    signals = Signals(children=True)
    with counter(quiet=quiet) as progress:
        rounds = Rounds(compare, installed(), signals, lambda way, number: progress.tell(_turn(way, number)))
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


def _turn(way: Way, number: int) -> str:
    """Whose turn it is; rounds count from 0."""
    return f"round {number + 1}: {way.value} ..."
