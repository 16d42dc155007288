"""`ddpdiag simulate`: record a run of an invented fleet, and judge it as a real one."""

import gc
import math
import sys
from collections.abc import Iterator, Sequence

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.outputs import Outputs, counter, publish
from ddpdiag.codec import disassemble
from ddpdiag.errors import UsageError, nearest
from ddpdiag.judgement import judge
from ddpdiag.model import Options, Recording
from ddpdiag.simulate import SimulateOptions
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, host_name, simulate
from ddpdiag.text import count


def run(wanted: SimulateOptions, outputs: Outputs) -> int:
    """Simulate one run, publish its report and return its exit code."""
    for name in ("slower", "noise", "transients", "congestion"):
        if math.isnan(getattr(wanted, name)):
            raise UsageError(f"--{name} nan: expected a share, such as 0.02")
    faults = Faults(tuple(_faults(wanted.fault)), wanted.slower)
    outputs.check()
    gc.disable()  # a run leaves no reference cycles, and searching for them takes a tenth of the time of a large fleet
    with counter(quiet=outputs.quiet) as progress:
        progress.tell(f"simulating {count(wanted.hosts, 'host')} ...")
        recording = _recorded(wanted, faults)
        progress.tell(f"judging {count(wanted.hosts, 'host')} ...")
        report = judge(recording, all_checks())
    publish(report, disassemble(recording), outputs, sys.stdout, sys.stderr)
    return report.exit_code


def _recorded(wanted: SimulateOptions, faults: Faults) -> Recording:
    """Simulate a run of the wanted fleet, and return its recording."""
    noise = Noise(sigma=wanted.noise, transients=wanted.transients, congested=wanted.congestion)
    fleet = Fleet(wanted.hosts, faults, noise, seed=wanted.seed, hosts_per_leaf=wanted.hosts_per_leaf)
    leaves = {host_name(host): f"leaf{fleet.leaf_of(host)}" for host in range(wanted.hosts)}
    options = Options(stages=("fabric",), backend="nccl", topology=leaves)
    return simulate(fleet, ranks_per_host=wanted.ranks_per_host, options=options, run_id=f"seed-{wanted.seed}")


def _faults(words: Sequence[str]) -> Iterator[tuple[Fault, int]]:
    """Parse words of the form KIND or KIND:COUNT. UsageError for any other word."""
    known = [fault.value for fault in Fault]
    for word in words:
        kind, colon, count = word.partition(":")
        if kind not in known or (colon and not (count.isdigit() and int(count) > 0)):
            near = "" if kind in known else nearest(kind, known)
            raise UsageError(f"--fault {word}: expected KIND or KIND:COUNT, with {', '.join(known)} as KIND{near}")
        yield Fault(kind), int(count) if colon else 1
