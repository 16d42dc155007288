"""`ddpdiag check`: options into data, then one rank's part, or all ranks of this host."""

import math
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdiag.checks import all_checks
from ddpdiag.cli.edge import complain, guarded
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import assemble
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.selection import validate
from ddpdiag.model import Depth, Options, Place, Report
from ddpdiag.model.recording import Line
from ddpdiag.probes.gpus import visible_gpus
from ddpdiag.probes.procfs import proc_root
from ddpdiag.render.progress import listener
from ddpdiag.runtime.environment import read_launch
from ddpdiag.runtime.launch import Run, prepare, run_rank
from ddpdiag.runtime.launchers import Asked, Launch
from ddpdiag.runtime.local import start_ranks

__all__ = ["Outputs", "Wishes", "run"]


@dataclass(frozen=True)
class Wishes:
    """The options as they were typed."""

    stages: tuple[str, ...]
    skip_stages: tuple[str, ...]
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    backend: str
    expect_gpus: int | None
    depth: str
    budget: float | None
    data_dir: str | None
    shared_dir: str | None
    settings: tuple[str, ...]
    strict: bool
    board_wait: float
    board_port: int | None
    port_range: str | None


def run(asked: Asked, wishes: Wishes, outputs: Outputs) -> int:
    """Take part in a run, or start one on this host; the exit code."""
    launch = read_launch(
        os.environ,
        asked,
        host=socket.gethostname(),
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        cores=os.cpu_count() or 1,
        fresh=secrets.token_hex(6),
    )
    for option, seconds in (("--budget", wishes.budget), ("--board-wait", wishes.board_wait)):
        if seconds is not None and not math.isfinite(seconds):
            raise UsageError(f"{option} {seconds}: expected a number of seconds; every run has an end")
    options = _options(wishes, launch)
    validate(options, all_checks())
    if launch.place.rank == 0:
        outputs.check()
    if wishes.port_range is not None:
        os.environ["DDPDIAG_PORT_RANGE"] = _port_range(wishes.port_range)
    if launch.note and launch.place.rank == 0:
        complain(launch.note)
    planned = _prepare(launch, options, wishes, outputs)
    if launch.ranks:
        return start_ranks(planned, lambda place: guarded(lambda: run_rank(planned, place)))
    return run_rank(planned, launch.place)


def _prepare(launch: Launch, options: Options, wishes: Wishes, outputs: Outputs) -> Run:
    progress = listener(sys.stderr)

    def published(lines: Sequence[Line]) -> Report:
        progress.close()
        report = judge(assemble(lines), all_checks())
        try:
            publish(report, lines, outputs, sys.stdout, sys.stderr)
        except (UsageError, BrokenPipeError) as error:
            complain(str(error))  # the verdict stands, and every rank still learns it
        return report

    return prepare(
        launch,
        options,
        all_checks(),
        board_wait=wishes.board_wait,
        board_port=wishes.board_port,
        publish=published,
        listener=lambda: progress,
    )


def _options(wishes: Wishes, launch: Launch) -> Options:
    depths = [depth.value for depth in Depth]
    if wishes.depth not in depths:
        raise UsageError(f"--depth {wishes.depth}: expected one of {', '.join(depths)}")
    return Options(
        depth=Depth(wishes.depth),
        stages=wishes.stages,
        skip_stages=wishes.skip_stages,
        select=tuple(code.upper() for code in wishes.select),
        ignore=tuple(code.upper() for code in wishes.ignore),
        backend=wishes.backend,
        expect_gpus=wishes.expect_gpus,
        budget_seconds=wishes.budget if wishes.budget is not None else _default_budget(launch.place),
        data_dir=_absolute(wishes.data_dir),
        shared_dir=_directory("--shared-dir", wishes.shared_dir),
        strict=wishes.strict,
        settings=_settings(wishes.settings),
    )


def _default_budget(place: Place) -> float:
    """60 s on one host, 120 s on several; a launcher that does not say how many ranks are here may span several."""
    return 60.0 if (place.local_world_size or 0) >= place.world_size else 120.0


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _directory(option: str, path: str | None) -> str | None:
    if path is not None and not Path(path).is_dir():
        raise UsageError(f"{option} {path}: no such directory on {socket.gethostname()}")
    return _absolute(path)


def _settings(values: Sequence[str]) -> dict[str, str]:
    settings = {}
    for value in values:
        name, equals, number = value.partition("=")
        code, dot, _word = name.partition(".")
        if not equals or not dot or not _is_threshold(number):
            raise UsageError(f"--set {value}: expected CODE.name=number, 0 or more, such as COL001.deadline_seconds=60")
        settings[f"{code.upper()}{name[len(code) :]}"] = number
    return settings


def _is_threshold(text: str) -> bool:
    """A finite number that is not negative: with NaN no limit is ever passed, and no deadline."""
    try:
        return math.isfinite(number := float(text)) and number >= 0
    except ValueError:
        return False


def _port_range(text: str) -> str:
    low, dash, high = text.partition("-")
    if not (dash and low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high) <= 65535):
        raise UsageError(f"--port-range {text}: expected LOW-HIGH within 1-65535, such as 29500-29599")
    return text
