"""Make logs of failed jobs for the tests: faults of tests/faults, met by a plain training script under plain torchrun.

    sudo python tests/tools/make_logs.py tests/recordings/logs rank_raises master_port_taken [--at-once 2]

What all processes write goes into one file as it comes, each line with the number of its host before it, as `srun -l`
does. torch's own time-outs are ten seconds instead of ten or thirty minutes, so that a hang ends as it would in a job.
Whoever is not over then gets SIGTERM, as from `scancel`. Paths and host names of this machine are taken out. Shown is
what `ddpdiag explain` says of each log, and what the check itself must find of the fault.
"""

import argparse
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

for _room in ("faults", "hosts", "processes"):
    sys.path.insert(0, str(Path(__file__).parent.parent / _room))

from fault import Fault  # noqa: E402
from jobs import Job  # noqa: E402
from launch import Launched, Launcher  # noqa: E402
from network import Network  # noqa: E402
from runs import faults, play, start  # noqa: E402

from ddpdiag.explain.matcher import explain_log  # noqa: E402

TIMEOUT_SECONDS = 10
# gloo waits five times as long as it was told to; then torchrun has to find out.
PATIENCE_SECONDS = 75.0
_FAREWELL_SECONDS = 5.0
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


def _is_about_files(name: str) -> bool:
    """Whether the fault is about a rendezvous by file; then the script meets by one."""
    return name.startswith("shared_directory_") or name == "stale_store"


class _Merged:
    """The lines of several files in the order in which they were seen, each with the number of its host."""

    def __init__(self) -> None:
        self._at: dict[Path, int] = {}
        self._lines: list[str] = []

    def read(self, jobs: dict[str, Job]) -> None:
        """What was written since."""
        for number, job in enumerate(jobs.values()):
            for path in (job._out, job._err):
                data = path.read_bytes()[self._at.get(path, 0) :]
                whole, newline, _rest = data.rpartition(b"\n")
                self._at[path] = self._at.get(path, 0) + len(whole) + len(newline)
                text = (whole + newline).decode("utf-8", "replace")
                self._lines += [f"{number}: {line}\n" for line in text.splitlines()]

    def text(self) -> str:
        return "".join(self._lines)


def log_of(name: str, fault: Fault, folder: Path) -> str:
    """What the script says of one fault."""
    folder.mkdir(parents=True)
    path = folder / "train.py"
    store = f"file://{folder}/network/shared/store" if _is_about_files(name) else ""
    script = SCRIPT.replace("INIT", store).replace("import os\n", "import datetime\nimport os\n", 1)
    path.write_text(script.replace('"gloo", **', f'"gloo", timeout=datetime.timedelta(seconds={TIMEOUT_SECONDS}), **'))
    by_rank = fault.bed.on_rank or fault.bed.absent
    extra = () if by_rank else ("--rdzv-conf", f"timeout={2 * TIMEOUT_SECONDS}")
    launcher = Launcher.ENV if by_rank else Launcher.TORCHRUN
    bed = replace(fault.bed, launcher=launcher, torchrun=(*fault.bed.torchrun, *extra))
    with Network(len(bed.ranks), folder / "network") as network:
        for host in network:
            host.variables |= {"CUDA_VISIBLE_DEVICES": ""}
        running = start(replace(fault, bed=bed), network, (str(path),), folder / "run")
        try:
            return _anonymous(_watched(fault, network, running), folder)
        finally:
            running.destroy()


def _watched(fault: Fault, network: Network, running: Launched) -> str:
    with ThreadPoolExecutor(1) as thread:
        played = thread.submit(play, replace(fault, budget=15.0), network, running)
        merged = _Merged()
        end = running.begin + PATIENCE_SECONDS
        while time.monotonic() < end and not running.is_over():
            merged.read(running.jobs)
            time.sleep(0.05)
        for job in running.jobs.values():
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGTERM)
        running.is_over(_FAREWELL_SECONDS)
        merged.read(running.jobs)
        with suppress(ProcessLookupError):
            played.result()
        return merged.text()


def _anonymous(text: str, folder: Path) -> str:
    """Without the paths and the name of this machine."""
    text = text.replace(str(folder), "/job").replace(socket.gethostname(), "login0")
    text = re.sub(r"/\S*?/site-packages", "/venv/lib/python3.11/site-packages", text)
    text = re.sub(r"/\S*?/bin/python3?(\.\d+)?", "/venv/bin/python", text)
    return re.sub(r"/\S*/tests/inject", "/job/inject", text)


def _explained(text: str) -> str:
    """What `ddpdiag explain` makes of it first: a page, and what kind of text led there."""
    found = explain_log([text.encode()], "log").sightings
    return f"{found[0].card.code} ({found[0].card.role.value})" if found else "nothing"


def _made(known: dict[str, Fault], names: list[str], at_once: int, folder: Path) -> Iterator[tuple[str, str]]:
    with ThreadPoolExecutor(at_once) as threads:
        yield from zip(names, threads.map(lambda name: log_of(name, known[name], folder / name), names), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("names", nargs="+", metavar="FAULT")
    parser.add_argument("--at-once", type=int, default=2)
    asked = parser.parse_args()
    asked.target.mkdir(parents=True, exist_ok=True)
    known = faults()
    with tempfile.TemporaryDirectory(prefix="ddpdiag-logs-") as folder:
        for name, text in _made(known, asked.names, asked.at_once, Path(folder)):
            (asked.target / f"{name}.log").write_text(text)
            print(f"{name}: {len(text.splitlines())} lines; {_explained(text)}; {known[name].expect}", flush=True)


if __name__ == "__main__":
    main()
