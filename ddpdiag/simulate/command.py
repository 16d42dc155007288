"""`ddpdiag simulate`: simulate a run of an invented fleet, and judge its recording like that of a real run."""

import gc
import math
import sys
from collections.abc import Iterator, Sequence

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.outputs import Outputs, progress_line, publish
from ddpdiag.codec import disassemble
from ddpdiag.errors import UsageError, did_you_mean
from ddpdiag.judgement import judge
from ddpdiag.model import Recording, RunOptions
from ddpdiag.simulate import SimulateArgs
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, host_name, simulate
from ddpdiag.text import count


def run(args: SimulateArgs, outputs: Outputs) -> int:
    """Simulate and judge one run, publish the report and return its exit code."""
    for name in ("slower", "noise", "transients", "congestion"):
        if math.isnan(getattr(args, name)):
            raise UsageError(f"--{name} nan: expected a share, such as 0.02")
    faults = Faults(tuple(_parse_faults(args.fault)), args.slower)
    outputs.check()
    gc.disable()  # a run makes no reference cycles; the search for cycles takes a tenth of a large fleet's time
    with progress_line(quiet=outputs.quiet) as progress:
        progress.tell(f"simulating {count(args.hosts, 'host')} ...")
        recording = _simulate_run(args, faults, outputs)
        progress.tell(f"judging {count(args.hosts, 'host')} ...")
        report = judge(recording, all_checks())
    publish(report, disassemble(recording), outputs, sys.stdout, sys.stderr)
    return report.exit_code


def _simulate_run(args: SimulateArgs, faults: Faults, outputs: Outputs) -> Recording:
    """Simulate a run of the fleet that the command line describes, and return its recording."""
    noise = Noise(sigma=args.noise, transients=args.transients, congestion=args.congestion)
    fleet = Fleet(args.hosts, faults, noise, seed=args.seed, hosts_per_leaf=args.hosts_per_leaf)
    leaves = {host_name(host): f"leaf{fleet.leaf_of(host)}" for host in range(args.hosts)}
    options = RunOptions(
        stages=("fabric",),
        backend="nccl",
        topology=leaves,
        strict=outputs.strict,
        max_slower_share=outputs.max_slowdown,
    )
    return simulate(fleet, ranks_per_host=args.ranks_per_host, options=options, run_id=f"seed-{args.seed}")


def _parse_faults(words: Sequence[str]) -> Iterator[tuple[Fault, int]]:
    """Parse each word of the form KIND or KIND:COUNT into a fault and its count. UsageError for any other word."""
    known = [fault.value for fault in Fault]
    for word in words:
        kind, colon, count = word.partition(":")
        if kind not in known or (colon and not (count.isdigit() and int(count) > 0)):
            near = "" if kind in known else did_you_mean(kind, known)
            raise UsageError(f"--fault {word}: expected KIND or KIND:COUNT, with {', '.join(known)} as KIND{near}")
        yield Fault(kind), int(count) if colon else 1
