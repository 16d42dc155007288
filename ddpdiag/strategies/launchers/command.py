"""`ddpdiag train --compare-launchers`: options into data, turns into a report, and the output of that report."""

import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

import msgspec

from ddpdiag.cli.check import launched, refuse_nccl_without_gpus
from ddpdiag.cli.options import LaunchOptions, spelled
from ddpdiag.cli.outputs import Outputs, counter, show, terminal
from ddpdiag.codec import encode, readable
from ddpdiag.errors import UsageError
from ddpdiag.model.train import Ended
from ddpdiag.render import files
from ddpdiag.render.page import Column, Page, one_line
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.supervisor.processes import Signals
from ddpdiag.strategies.command import MOST_IMAGES, MOST_STEPS, number_within
from ddpdiag.strategies.launchers.judge import Seen, judged
from ddpdiag.strategies.launchers.methods import Compare, LauncherRow, LaunchersReport, LaunchMethod, typed
from ddpdiag.strategies.launchers.turns import Rounds
from ddpdiag.strategies.options import TrainOptions
from ddpdiag.strategies.sections import STYLES, shown, write_table
from ddpdiag.text import count, seconds

# The options of `train` that mean the same here.
_OPTIONS = (
    *("compare_launchers", "rounds", "nproc_per_node", "steps", "batch_size", "backend", "budget", "data_dir"),
    *("json", "quiet", "color"),
)
# The first three steps are not timed, and a median of fewer than three is unreliable.
_LEAST_STEPS = 6
_MOST_ROUNDS = 20
_LEAST_BUDGET = 60.0
_AGAIN = "start `ddpdiag train --compare-launchers` once on the host, by itself"


def refuse_others(given: Iterable[str]) -> None:
    """UsageError for an option that has no meaning here; `given` are the names of those that were typed."""
    for name in given:
        if name not in _OPTIONS:
            raise UsageError(
                f"{spelled(name)} has no meaning with --compare-launchers, which trains with DistributedDataParallel "
                "on this host, started by each launcher: leave out one of the two"
            )


def run(launch_options: LaunchOptions, options: TrainOptions, outputs: Outputs) -> int:
    """Start the training by each launcher, round after round; the exit code."""
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
            files.write(json, as_json(report))
    finally:  # a file that cannot be written shall not cost the table
        show(render(report, color=colored, width=width), stream)
    return report.exit_code


def refuse_launched(launch: Launch) -> None:
    """UsageError in a process that a launcher started: every rank would start all ranks, by each launcher."""
    place = launch.place
    if place.launcher == "standalone":
        return
    raise UsageError(
        f"--compare-launchers starts the ranks itself, by each launcher, and this process is rank {place.rank} of "
        f"{place.world_size} already (launcher: {place.launcher}): {_AGAIN}"
    )


def checked(options: TrainOptions, ranks: int) -> Compare:
    """What is compared, if it makes sense; UsageError otherwise. `ranks` are those of the launch."""
    within = partial(number_within, context=" with --compare-launchers")
    within("--steps", options.steps, _LEAST_STEPS, MOST_STEPS)
    within("--batch-size", options.batch_size, ranks, MOST_IMAGES)
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


def _measured(compare: Compare, host: str, *, quiet: bool) -> LaunchersReport:
    begin = time.monotonic()
    signals = Signals(children=True)
    # Only this user may read it, and it is gone afterwards with all that launchers left in it.
    with (
        counter(quiet=quiet) as progress,
        TemporaryDirectory(prefix="ddpdiag-launchers-", ignore_cleanup_errors=True) as folder,
    ):
        rounds = Rounds(compare, folder, signals, lambda method, n: progress.tell(f"round {n + 1}: {method.value} ..."))
        rounds.run()
    seen = Seen(
        starts=tuple(rounds.starts),
        controls=tuple(rounds.controls),
        host=host,
        cores=len(os.sched_getaffinity(0)),
        seconds=time.monotonic() - begin,
        told=signals.told,
    )
    return judged(compare, seen, {method: typed(method, compare.ranks) for method in LaunchMethod})


# For people and for scripts ------------------------------------------------------------------------------------------


_VERDICTS = {0: "bold green", 1: "bold red"}


def as_json(report: LaunchersReport) -> str:
    """The whole report, indented, with a newline at the end."""
    return msgspec.json.format(encode(report), indent=2).decode() + "\n"


def render(report: LaunchersReport, *, color: bool, width: int) -> str:
    """The table, what explains it, and the verdict, as text of `width` columns."""
    page = Page(color=color, width=width)
    page.write(_head(report), lead="ddpdiag: ", lead_style="bold")
    page.write(_what(report), style="dim")
    page.blank()
    _table(page, report.rows)
    _reasons(page, report.rows)
    for sentence in report.explained:
        page.write(one_line(sentence))
    if report.explained:
        page.blank()
    page.write(one_line(report.sentence), style=_VERDICTS.get(report.exit_code, "bold yellow"))
    return page.text()


def _head(report: LaunchersReport) -> str:
    torch = f"torch {report.torch_version}" if report.torch_version else ""
    who = f"{count(report.asked.ranks, 'rank')} on {report.host} ({count(report.cores, 'core')})"
    parts = (who, report.backend or report.asked.backend, report.device or "", torch)
    told = ", ".join(one_line(part) for part in parts if part)
    return f"{told}; {seconds(report.seconds)} of {seconds(report.asked.budget_seconds)}"


def _what(report: LaunchersReport) -> str:
    asked = report.asked
    return (
        f"The same training, started by each launcher: {count(asked.steps, 'step')} of "
        f"{count(asked.batch_size, 'image')} over all ranks in DistributedDataParallel; the best of up to "
        f"{count(asked.rounds, 'round')}. start: from the command to the group of all ranks; launcher: until the last "
        "rank runs its first line; step: the median of the slowest rank; x: times torchrun's; threads: of each rank."
    )


def _table(page: Page, rows: Sequence[LauncherRow]) -> None:
    figures = (
        ("start", [shown(row.start_seconds, "{:.2f} s") for row in rows]),
        ("x", [shown(row.start_ratio, "{:.2f}") for row in rows]),
        ("launcher", [shown(row.launcher_seconds, "{:.2f} s") for row in rows]),
        ("step", ["-" if row.step_seconds is None else f"{row.step_seconds * 1e3:.1f} ms" for row in rows]),
        ("x", [shown(row.step_ratio, "{:.2f}") for row in rows]),
        ("threads", [_threads(row.threads) for row in rows]),
    )
    names = Column("started by", tuple(row.method.value for row in rows), right=False)
    write_table(page, names, [row.ended for row in rows], figures)


def _threads(threads: Sequence[int]) -> str:
    return "-".join(str(number) for number in sorted({min(threads), max(threads)})) if threads else "-"


def _reasons(page: Page, rows: Sequence[LauncherRow]) -> None:
    """Why, of those that do not work, and the command of one that is alone with its reason."""
    alike: dict[tuple[Ended, str], list[LauncherRow]] = {}
    for row in rows:
        if row.ended is not Ended.WORKS:
            alike.setdefault((row.ended, row.reason), []).append(row)
    for (ended, reason), those in alike.items():
        lead = f"{', '.join(row.method.value for row in those)} {ended.value}: "
        if len(those) == 1:
            page.write(one_line(reason), lead=lead, lead_style=STYLES[ended])
            page.write(one_line(those[0].command), indent=4, style="dim")
        else:
            page.write(lead + one_line(reason))
    deprecated = [
        row.method
        for row in rows
        if row.ended is Ended.WORKS and row.method in (LaunchMethod.LAUNCH, LaunchMethod.LAUNCH_USE_ENV)
    ]
    if deprecated:
        page.write("torch.distributed.launch is deprecated in favour of torchrun.", style="dim")
    if alike or deprecated:
        page.blank()
