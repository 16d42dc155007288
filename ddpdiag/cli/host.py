"""`ddpdiag host`: test this host as one rank and report, in a child process with a deadline."""

import math
import os
import secrets
import socket
import sys
from datetime import UTC, datetime

import ddpdiag
from ddpdiag.checks.api import Stage
from ddpdiag.checks.registry import check_by_code
from ddpdiag.cli.edge import guarded
from ddpdiag.cli.exit_codes import exit_code_of
from ddpdiag.cli.options import HostArgs
from ddpdiag.cli.outputs import Outputs, publish
from ddpdiag.codec import assemble, readable
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.ending import with_signal
from ddpdiag.judgement.selection import is_selected, validate
from ddpdiag.model import Header, Place, RunOptions
from ddpdiag.model.options import ALONE
from ddpdiag.render.progress import SilentListener
from ddpdiag.runtime.launchers import own_arrival
from ddpdiag.runtime.launchers.slurm import node_name
from ddpdiag.runtime.single_rank import AnnounceStep, call_with_deadline, run_alone
from ddpdiag.runtime.supervisor.processes import Signals

# The codes of the checks of one host that need no torch. GPU004 to GPU008 judge the data of GPU003.
WITHOUT_TORCH = (
    *("HST001", "HST002", "HST003", "HST004", "HST007"),
    *("GPU001", "GPU003", "GPU004", "GPU005", "GPU006", "GPU007", "GPU008", "GPU011"),
)
# GPU010 and HST006 compare counters before and after the run. Without torch a run is too short, and loads no GPU.
WITH_TORCH = ("LCH003", "HST005", "HST006", "GPU002", "GPU010", "GPU012")
# The codes of the checks that judge the run itself (Stage.RUN).
_CODES_ABOUT_RUN = ("RUN001", "RUN002", "RUN003", "RUN004")


def run(args: HostArgs, outputs: Outputs) -> int:
    """Test this host, report, and return the exit code. Raises RunLost if the budget is spent before the report."""
    if not math.isfinite(args.budget):
        raise UsageError(f"--budget {args.budget}: expected a finite number of seconds, since every run must end")
    options = _run_options(args, outputs)
    return call_with_deadline(
        lambda announce: guarded(lambda: _test_host(args, options, outputs, announce)), args.budget
    )


def codes(*, torch: bool) -> tuple[str, ...]:
    """The codes of the checks of `ddpdiag host`, with --torch or without, in the order of `ddpdiag checks`."""
    stages = list(Stage)
    wanted = (*WITHOUT_TORCH, *(WITH_TORCH if torch else ()))
    return tuple(sorted(wanted, key=lambda code: (stages.index(check_by_code(code).stage), code)))


def _run_options(args: HostArgs, outputs: Outputs) -> RunOptions:
    options = RunOptions(
        ignore=args.ignore,
        expect_gpus=args.expect_gpus,
        budget_seconds=args.budget,
        strict=outputs.strict,
        settings=dict(args.set_),
        alone=True,
    )
    validate(options, map(check_by_code, codes(torch=args.torch)))
    return options


def _test_host(args: HostArgs, options: RunOptions, outputs: Outputs, announce: AnnounceStep) -> int:
    announce("check the files to write")
    outputs.check()
    # This process is the only rank, whatever the variables of a launcher say.
    host = node_name(os.environ, readable(socket.gethostname()))
    place = Place(rank=0, world_size=1, host=host, launcher=ALONE, local_rank=0, local_world_size=1, node_rank=0)
    header_codes = codes(torch=args.torch)
    checks = tuple(map(check_by_code, (*header_codes, *_CODES_ABOUT_RUN)))
    announce("count the GPUs")
    arrival = own_arrival(place)
    announce("test the host")
    selected_checks = tuple(check for check in checks if is_selected(check, options))
    signals = Signals()
    header = Header(
        run_id=secrets.token_hex(6),
        world_size=1,
        launcher=place.launcher,
        options=options,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=ddpdiag.__version__,
        checks=header_codes,
    )
    lines = run_alone(arrival, header, selected_checks, SilentListener(), signals)
    was_signalled = signals.received is not None
    announce("judge")
    report = judge(assemble(lines), checks)
    if not was_signalled:
        report = with_signal(report, signals.received)
    announce("write the report")
    publish(report, lines, outputs, sys.stdout, sys.stderr)
    return exit_code_of(report, outputs.exit_codes)
