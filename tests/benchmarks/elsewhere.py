"""What do others say of the same faults? Every fault of tests/faults, met by three commands in turn.

    python -m pip install -c constraints.txt -e '.[test,benchmark]'
    sudo python tests/benchmarks/elsewhere.py [--only NAME ...] [--at-once 4]

    ddpdiag    the check, as the gallery runs it
    script     an ordinary training script under plain torchrun (or with torchrun's variables set by hand, where the
               fault lies there): `init_process_group("gloo")`, all-reduce of 4 bytes and of 16 MiB, 20 steps of
               DistributedDataParallel, a barrier, out. torch's own time-outs, as nearly everybody has them.
    accelerate what `accelerate test` runs, on the same hosts, over gloo; but for the part of it that is made for two
               processes and fails with more of them by itself, and with a fourth, innocent host where there are three,
               because three cannot share its data.

Hosts, faults and their injection are the same; each run has a network of its own. Whoever is not over after 90 s is
stopped. For the two others the table shows after how many seconds the first process ended with an error, whom
torchrun's "Root Cause" names (or the error text), and the error itself, shortened; "notices" says whether the command
failed at all, "right" whether exactly the guilty were named. A fault that does not exist for a command is left out:
files of digits that the script does not read, variables of single ranks where accelerate starts the ranks. Where the
fault is that of a shared directory, the script meets by `file://` there. Two controls without any fault come first.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))
sys.path.insert(0, str(Path(__file__).parent.parent / "hosts"))
sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))

from fault import NOBODY, Fault
from launch import Bed, Launched, Launcher
from namespaces import NetworkError
from network import Network, reason_against
from runs import faults, play, run, start

PATIENCE_SECONDS = 90.0

# Whoever fails here says nothing by failing elsewhere.
_FINE = Fault(about="Nothing is wrong.", expect=(), blame=NOBODY, exit_code=0)
CONTROLS = {
    "control: 2 hosts, no fault": replace(_FINE, bed=Bed(ranks=(1, 1))),
    "control: 3 hosts, no fault": replace(_FINE, bed=Bed(ranks=(1, 1, 1))),
}

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", **(place | {"init_method": "INIT"} if "INIT" else {}))
for count in (1, 4 << 20):
    dist.all_reduce(torch.ones(count))
layers = torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    images, labels = torch.randn(32, 784), torch.randint(10, (32,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
print("trained")
"""

# See start.py for why it is "MULTI_GPU".
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: {hosts}
machine_rank: {host}
main_process_ip: {coordinator}
main_process_port: 29500
num_processes: {ranks}
rdzv_backend: static
same_network: true
mixed_precision: 'no'
use_cpu: false
"""

# What `accelerate test` launches, but for one of its parts, which fails by itself with any number of processes but two.
ACCELERATE_TEST = """\
from accelerate.test_utils.scripts import test_script

test_script.test_split_between_processes_tensor = lambda: None
test_script.main()
"""

_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?host\s*: (\S+).*?rank\s*: (\d+)", re.DOTALL)
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception|Failure)\w*: .+)$", re.MULTILINE)
_ABORTED = re.compile(r"^.*(?:terminate called|what\(\): ).*$", re.MULTILINE)


@dataclass(frozen=True)
class Said:
    """What one command made of one fault. `seconds` until it was over, or stopped."""

    command: str
    seconds: float
    over: bool
    notices: bool
    named: str
    right: bool
    text: str


def others() -> dict[str, Callable[[str, Fault, Path], Said | None]]:
    """The other commands by name; accelerate only where it is installed."""
    known: dict[str, Callable[[str, Fault, Path], Said | None]] = {"script": by_script}
    if shutil.which("accelerate", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        known["accelerate"] = by_accelerate
    else:
        print("accelerate is not installed: left out", flush=True)
    return known


def by_us(name: str, fault: Fault, folder: Path) -> Said:
    """The check."""
    result = run(name, fault, folder)
    counted = result.expected or result.errors
    named = sorted({str(who) for finding in counted for key in ("links", "hosts") for who in finding[key]})
    ranks = sorted({rank for finding in counted for rank in finding["ranks"]})
    codes = ", ".join(dict.fromkeys(finding["code"] for finding in result.expected or result.errors))
    whom = ", ".join([*(f"rank {rank}" for rank in ranks), *named]) or "nobody"
    right = result.is_detected and result.blames_right and not result.innocents
    return Said("ddpdiag", result.seconds, result.ended, result.is_detected, whom, right, codes or "a sentence")


def by_script(name: str, fault: Fault, folder: Path) -> Said | None:
    """The script under torchrun, or with the variables that the fault sets."""
    if _is_ours(name):
        return None
    path = folder / "train.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The network makes this folder when it begins.
    store = f"file://{folder}/network/shared/store" if _is_about_files(name) else ""
    path.write_text(SCRIPT.replace("INIT", store))
    by_rank = fault.bed.on_rank or fault.bed.absent  # torchrun cannot start some ranks otherwise than the rest
    bed = replace(fault.bed, launcher=Launcher.ENV if by_rank else Launcher.TORCHRUN)
    return _meet("script", replace(fault, bed=bed), (str(path),), folder)


def by_accelerate(name: str, fault: Fault, folder: Path) -> Said | None:
    """`accelerate test`, which starts its ranks itself, as many on each host."""
    bed = fault.bed
    if bed.on_rank or len(set(bed.ranks)) > 1 or bed.torchrun or _is_ours(name) or _is_about_files(name):
        return None
    if len(bed.ranks) == 3:
        bed = replace(bed, ranks=(*bed.ranks, bed.ranks[0]))  # its test can be split among 2, 4 or 8 processes only
        fault = replace(fault, bed=bed)
    if bed.size not in (2, 4, 8):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for host in range(len(bed.ranks)):
        values = {"hosts": len(bed.ranks), "host": host, "coordinator": bed.coordinator, "ranks": bed.size}
        (folder / f"h{host}.yaml").write_text(CONFIG.format(**values))
    test, start = folder / "accelerate_test.py", folder / "accelerate_launch.py"
    test.write_text(ACCELERATE_TEST)
    # The launcher's own place: its number of the host is in its configuration, which the shell of the host picks.
    # Its test writes a file in one process that another one reads, so that all must stand in one directory.
    pick = f"import os, runpy, socket, sys; os.chdir('{folder}'); sys.argv = ['accelerate', 'launch', '--config_file', "
    pick += f"'{folder}/' + socket.gethostname() + '.yaml', '{test}']; "
    pick += "runpy.run_module('accelerate.commands.accelerate_cli', run_name='__main__')"
    start.write_text(pick)
    return _meet("accelerate", fault, (str(start),), folder, per_host=True)


def _is_ours(name: str) -> bool:
    """Is the fault about what ddpdiag alone reads or keeps?"""
    return name.startswith("digits_") or name in ("budget_spent", "only_board_ports_are_dropped")


def _is_about_files(name: str) -> bool:
    """Is the fault about a rendezvous by file? Then the script meets by one."""
    return name.startswith("shared_directory_") or name == "stale_store"


def _meet(command: str, fault: Fault, words: tuple[str, ...], folder: Path, *, per_host: bool = False) -> Said | None:
    """Run a command on hosts that have the fault, and read what it says."""
    with Network(len(fault.bed.ranks), folder / "network") as network:
        for host in network:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            host.variables |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PATH": path}
        begin = _on_hosts if per_host else start
        running = begin(fault, network, words, folder / "run")
        try:
            # A fault that this command never reaches is not waited for; and whom it hits may have ended before.
            with suppress(ProcessLookupError):
                play(replace(fault, budget=min(fault.budget, 30.0)), network, running)
            over = running.is_over(running.begin + PATIENCE_SECONDS - time.monotonic())
            return _read(command, fault, running, over=over)
        except NetworkError as error:
            print(f"this fault cannot be made for {command}: {error}", flush=True)
            return None
        finally:
            running.destroy()


def _on_hosts(fault: Fault, network: Network, words: tuple[str, ...], folder: Path) -> Launched:
    """One process on each host, with the fault in place."""
    running = Launched(folder)
    if fault.before is not None:
        fault.before(network)
    for host in network:
        if fault.inject:
            host.variables["DDPDIAG_TEST_FAULT"] = fault.inject
        if not fault.bed.absent.issuperset(fault.bed.of_host(host.index)):
            running.start(host.name, host, words, {})
    return running


def _read(command: str, fault: Fault, running: Launched, *, over: bool) -> Said:
    text = {name: job.stdout + job.stderr for name, job in running.jobs.items()}
    codes = [job.process.returncode for job in running.jobs.values()]
    failed = over and any(codes)
    causes = {match for said in text.values() for match in _ROOT_CAUSE.findall(said)}
    named = {f"rank {rank}" for _host, rank in causes}
    errors = [error for said in text.values() for error in (_ERROR.findall(said) or _ABORTED.findall(said))]
    words = max(errors, key=errors.count)[:110] if errors else ""
    guilty = {f"rank {rank}" for rank in fault.blame.ranks} or {
        f"rank {rank}" for rank in range(fault.bed.size) if f"h{fault.bed.host_of(rank)}" in fault.blame.hosts
    }
    right = failed and named == guilty and bool(guilty)
    seconds = running.seconds if over else PATIENCE_SECONDS
    whom = ", ".join(sorted(named)) or "nobody"
    said = words or ("failed" if failed else "" if over else "nothing until it was stopped")
    return Said(command, seconds, over, failed, whom, right, said)


def compare(chosen: dict[str, Fault], at_once: int, folder: Path) -> Iterator[tuple[str, list[Said]]]:
    """All commands, one fault after the other, a few at a time; each fault as soon as it is through."""
    commands = {"ddpdiag": by_us, **others()}

    def meet(name: str) -> tuple[str, list[Said]]:
        said = [by(name, chosen[name], folder / re.sub(r"\W", "_", name) / command) for command, by in commands.items()]
        shutil.rmtree(folder / re.sub(r"\W", "_", name), ignore_errors=True)
        return name, [one for one in said if one is not None]

    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(meet, chosen)


def show(name: str, said: Iterable[Said]) -> None:
    """A fault's lines."""
    print(name)
    for one in said:
        end = f"{one.seconds:5.1f} s" if one.over else "stopped"
        verdict = "right" if one.right else "notices" if one.notices else "silent"
        print(f"  {one.command:<11}{end:>8}  {verdict:<8} {one.named:<24} {one.text}")
    sys.stdout.flush()


def totals(found: dict[str, list[Said]]) -> str:
    """One line for each command."""
    lines = [f"{'command':<12}{'faults':>7}{'over in 90 s':>14}{'failed':>8}{'right culprit':>15}{'median':>9}"]
    for command in dict.fromkeys(one.command for said in found.values() for one in said):
        own = [one for said in found.values() for one in said if one.command == command]
        seconds = sorted(one.seconds for one in own)
        lines.append(
            f"{command:<12}{len(own):>7}{sum(one.over for one in own):>14}{sum(one.notices for one in own):>8}"
            f"{sum(one.right for one in own):>15}{seconds[len(own) // 2]:>7.1f} s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults (default: all)")
    parser.add_argument("--at-once", type=int, default=4, help="how many faults at a time (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the table here, and go on from what it holds")
    asked = parser.parse_args()
    if reason := reason_against():
        sys.exit(f"no hosts can be made here: {reason}")
    rows = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    found = {name: [Said(**one) for one in said] for name, said in rows.items()}
    wanted = CONTROLS | {name: fault for name, fault in faults().items() if not asked.only or name in asked.only}
    chosen = {name: fault for name, fault in wanted.items() if name not in found}
    with tempfile.TemporaryDirectory(prefix="ddpdiag-elsewhere-") as folder:
        for name, said in compare(chosen, asked.at_once, Path(folder)):
            show(name, said)
            found[name] = said
            if asked.json:
                asked.json.write_text(
                    json.dumps({name: [vars(one) for one in said] for name, said in found.items()}, indent=1)
                )
    print(f"\n{totals({name: said for name, said in found.items() if name not in CONTROLS})}")


if __name__ == "__main__":
    main()
