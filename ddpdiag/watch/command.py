"""`ddpdiag watch`: options into data; start the command and watch it, or judge what an earlier watch kept."""

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import show, terminal
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.watch import report
from ddpdiag.watch.child import Child, leave_as
from ddpdiag.watch.evidence import recorder_variables
from ddpdiag.watch.judge import judged, merged
from ddpdiag.watch.loop import Wanted, Watch
from ddpdiag.watch.output import open_output
from ddpdiag.watch.peers import Peers, identity, job_name
from ddpdiag.watch.remote_launchers import refuse_remote_launchers

_LEAST_STALL = 1.0
_UNOBSERVED = (
    "Standard output and error go where nothing shows that they are written to (/dev/null), and no --output names "
    "another file."
)


def run(
    command: Sequence[str],
    *,
    stall: float,
    kill: bool,
    output: Sequence[str],
    bundle: str | None,
    flight_recorder: bool,
    alone: bool,
) -> int:
    """Start the command, watch it, and leave as it does."""
    if not command[0]:
        raise UsageError("the command to watch is empty: expected it after --, such as torchrun train.py")
    refuse_remote_launchers(command, flight_recorder=flight_recorder)
    if not math.isfinite(stall) or stall < _LEAST_STALL:
        raise UsageError(f"--stall {stall:g}: expected {_LEAST_STALL:g} s or more")
    kept = None if bundle is None else report.Bundle(bundle)
    written = open_output(output)
    if kill and not written.sinks and not flight_recorder:
        raise UsageError(
            f"--kill: {_UNOBSERVED} Give --output FILE, or --flight-recorder: else a healthy job would be killed"
        )
    notes = () if written.sinks else (_UNOBSERVED,)
    wanted = Wanted(command, stall, kill, notes, output, flight_recorder)
    folder = tempfile.mkdtemp(prefix="ddpdiag-watch-") if flight_recorder else None
    try:
        env = os.environ | (recorder_variables(folder) if folder is not None else {})
        child = Child(command, env, {number: relay.descriptor for number, relay in written.relays.items()})
        for relay in dict.fromkeys(written.relays.values()):
            relay.start()
        peers = Peers(None if alone else job_name(os.environ), identity(os.environ, kill=kill))
        reporter = report.Reporter(lambda look, verdict: report.show(look, verdict, kept), complain)
        watching = Watch(wanted, child, written, peers, reporter)
        watching.run()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if watching.bug is not None:
        complain("a bug in ddpdiag ended the watching, not the command; please report what follows:\n" + watching.bug)
    if watching.killed is not None:
        return watching.killed
    return 0 if child.status is None else leave_as(child.status)


def read(paths: Sequence[str]) -> int:
    """Judge what --bundle kept, of all hosts that looked at the newest silence; 1 if a rank is named, else 3."""
    if not all(paths):
        raise UsageError("--read: the name of a file is empty")
    stall = merged([stall for path in paths for stall in report.read_bundle(path)])
    verdict = judged(stall)
    width, color = terminal(sys.stdout)
    show(report.render(stall, verdict, color=color, width=width, stacks=True), sys.stdout)
    return ExitCode.UNFIT if verdict.named else ExitCode.UNKNOWN
