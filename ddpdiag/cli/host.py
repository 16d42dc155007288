"""`ddpdiag host`: turn options into data, test this host as one rank, and report, all in a child with a deadline."""

import math
import os
import secrets
import socket
import sys
from datetime import UTC, datetime

import ddpdiag
from ddpdiag.checks.api import Stage
from ddpdiag.checks.registry import by_code
from ddpdiag.cli.edge import guarded
from ddpdiag.cli.options import HostOptions
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import assemble, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.ending import with_signal
from ddpdiag.judgement.selection import selected, validate
from ddpdiag.model import Header, Options, Place
from ddpdiag.model.options import ALONE
from ddpdiag.render.progress import SilentListener
from ddpdiag.runtime.launchers import own_arrival
from ddpdiag.runtime.launchers.slurm import node_name
from ddpdiag.runtime.single_rank import AnnounceStep, call_with_deadline, run_alone
from ddpdiag.runtime.supervisor.processes import Signals

# Checks of one host that need no torch; GPU004 to GPU008 judge the data of GPU003.
WITHOUT_TORCH = (
    *("HST001", "HST002", "HST003", "HST004", "HST007"),
    *("GPU001", "GPU003", "GPU004", "GPU005", "GPU006", "GPU007", "GPU008", "GPU011"),
)
# GPU010 and HST006 compare before and after: without torch there is no time in between, and nothing loads a GPU.
WITH_TORCH = ("LCH003", "HST005", "HST006", "GPU002", "GPU010", "GPU012")
# Checks of the run itself.
_OF_THE_RUN = ("RUN001", "RUN002", "RUN003", "RUN004")


def run(asked: HostOptions, outputs: Outputs) -> int:
    """Test this host, report, and return the exit code. Raises RunLost if the budget ends before the report."""
    if not math.isfinite(asked.budget):
        raise UsageError(f"--budget {asked.budget}: expected a finite number of seconds, since every run must end")
    options = _options(asked, outputs)
    return call_with_deadline(lambda announce: guarded(lambda: _look(asked, options, outputs, announce)), asked.budget)


def codes(*, torch: bool) -> tuple[str, ...]:
    """The codes of the checks that run, in the order of the list of checks."""
    stages = list(Stage)
    wanted = (*WITHOUT_TORCH, *(WITH_TORCH if torch else ()))
    return tuple(sorted(wanted, key=lambda code: (stages.index(by_code(code).stage), code)))


def _options(asked: HostOptions, outputs: Outputs) -> Options:
    options = Options(
        ignore=asked.ignore,
        expect_gpus=asked.expect_gpus,
        budget_seconds=asked.budget,
        strict=outputs.strict,
        settings=dict(asked.set_),
        alone=True,
    )
    validate(options, map(by_code, codes(torch=asked.torch)))
    return options


def _look(asked: HostOptions, options: Options, outputs: Outputs, announce: AnnounceStep) -> int:
    announce("check the files to write")
    outputs.check()
    # One rank for the whole host, whatever a launcher around this process says.
    node = node_name(os.environ, readable(socket.gethostname()))
    place = Place(rank=0, world_size=1, host=node, launcher=ALONE, local_rank=0, local_world_size=1, node_rank=0)
    names = codes(torch=asked.torch)
    checks = tuple(map(by_code, (*names, *_OF_THE_RUN)))
    announce("count the GPUs")
    arrival = own_arrival(place)
    announce("test the host")
    chosen = tuple(check for check in checks if selected(check, options))
    signals = Signals()
    header = Header(
        run_id=secrets.token_hex(6),
        world_size=1,
        launcher=place.launcher,
        options=options,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=ddpdiag.__version__,
        checks=names,
    )
    lines = run_alone(arrival, header, chosen, SilentListener(), signals)
    signalled_before = signals.received is not None
    announce("judge")
    report = judge(assemble(lines), checks)
    if not signalled_before:
        report = with_signal(report, signals.received)
    announce("write the report")
    publish(report, lines, outputs, sys.stdout, sys.stderr)
    return report.exit_code
