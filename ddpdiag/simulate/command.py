"""`ddpdiag simulate`: a fleet that does not exist, judged as a real one."""

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.options import Color
from ddpdiag.cli.outputs import Outputs, counter, publish, show
from ddpdiag.codec import disassemble
from ddpdiag.errors import ExitCode, UsageError, nearest
from ddpdiag.judgement import judge
from ddpdiag.model import Options, Recording
from ddpdiag.simulate import SimulateOptions
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, host_name, simulate
from ddpdiag.text import count

_BLAMING = ("FAB001.alone", "FAB001.host", "FAB001.domain")


def run(wanted: SimulateOptions, outputs: Outputs) -> int:
    """One run with its report, or the rates of many; the exit code of the one."""
    for name in ("slower", "noise", "transients", "congestion"):
        if math.isnan(getattr(wanted, name)):
            raise UsageError(f"--{name} nan: expected a share, such as 0.02")
    faults = Faults(tuple(_faults(wanted.fault)), wanted.slower)
    if wanted.trials is not None:
        if replace(outputs, quiet=False, color=Color.AUTO) != Outputs():
            raise UsageError(
                "--trials counts blamed hosts over many runs, and makes no report: leave out the options of the output"
            )
        with counter(quiet=outputs.quiet) as progress:
            rates = _rates(wanted, faults, wanted.trials, progress.tell)
        show(rates, sys.stdout)
        return int(ExitCode.FIT)
    outputs.check()
    gc.disable()  # nothing here is dropped in circles, and to look for such takes a tenth of the time of a large fleet
    with counter(quiet=outputs.quiet) as progress:
        progress.tell(f"simulating {count(wanted.hosts, 'host')} ...")
        _, recording = _recorded(wanted, faults, wanted.seed, wanted.ranks_per_host)
        progress.tell(f"judging {count(wanted.hosts, 'host')} ...")
        report = judge(recording, all_checks())
    publish(report, disassemble(recording), outputs, sys.stdout, sys.stderr)
    return report.exit_code


def _recorded(wanted: SimulateOptions, faults: Faults, seed: int, ranks_per_host: int = 1) -> tuple[Fleet, Recording]:
    """The fleet of this seed, and the recording of its run."""
    noise = Noise(sigma=wanted.noise, transients=wanted.transients, congested=wanted.congestion)
    fleet = Fleet(wanted.hosts, faults, noise, seed=seed, hosts_per_leaf=wanted.hosts_per_leaf)
    leaves = {host_name(host): f"leaf{fleet.leaf_of(host)}" for host in range(wanted.hosts)}
    options = Options(stages=("fabric",), backend="nccl", topology=leaves)
    return fleet, simulate(fleet, ranks_per_host=ranks_per_host, options=options, run_id=f"seed-{seed}")


def _faults(words: Sequence[str]) -> Iterator[tuple[Fault, int]]:
    """KIND or KIND:COUNT."""
    known = [fault.value for fault in Fault]
    for word in words:
        kind, colon, count = word.partition(":")
        if kind not in known or (colon and not (count.isdigit() and int(count) > 0)):
            near = "" if kind in known else nearest(kind, known)
            raise UsageError(f"--fault {word}: expected KIND or KIND:COUNT, with {', '.join(known)} as KIND{near}")
        yield Fault(kind), int(count) if colon else 1


def _rates(wanted: SimulateOptions, faults: Faults, trials: int, tell: Callable[[str], None]) -> str:
    """The rates at which hosts were blamed, over so many seeds."""
    sums: Counter[str] = Counter()
    rounds: Counter[int] = Counter()
    for done, seed in enumerate(range(wanted.seed, wanted.seed + trials)):
        tell(f"{done:,} of {count(trials, 'run')} done")
        fleet, recording = _recorded(wanted, faults, seed)
        report = judge(recording, all_checks())
        words = Counter(finding.code for finding in report.findings)
        named = {node for finding in report.findings if finding.code in _BLAMING for node in finding.hosts}
        failing = {host_name(host) for host in fleet.failing}
        sums += Counter(
            false=len(named - failing),
            missed=len(failing - named),
            failing=len(failing),
            paths=words["FAB001.path"],
            systemic=words["FAB001.systemic"],
        )
        rounds[sum(trial.code == fab001.CHECK.code for trial in recording.trials)] += 1
    spread = ", ".join(f"{number} in {count}" for number, count in sorted(rounds.items()))
    return (
        f"{trials} runs of {wanted.hosts} hosts, seeds {wanted.seed}-{wanted.seed + trials - 1}\n"
        f"healthy hosts blamed per run   {sums['false'] / trials:.4f}\n"
        f"failing hosts missed           {sums['missed']} of {sums['failing']}\n"
        f"links blamed per run           {sums['paths'] / trials:.4f}\n"
        f"runs in which no host could be blamed because most fail   {sums['systemic']}\n"
        f"trials of a run                {spread}\n"
    )
