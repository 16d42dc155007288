"""Does `ddpdiag watch` name the rank that stops a job, for each fault, rank and size, started by it and with --pid?

    python tests/benchmarks/watch_matrix.py [--ranks 4,8] [--faults sleep,...] [--modes watch,pid] [--no-cost]

The faults are those of NVRx's fault-injection loop that need no GPU. Each row is a DistributedDataParallel job of its
own over gloo on the CPU. In mode `watch`, torchrun runs below `ddpdiag watch --stall 5`. In mode `pid`, the ranks are
started by hand, and a rank that raises stays in Python's shutdown, as one does that has another thread: so its job
hangs, and `ddpdiag watch --pid` looks 5 s later. A killed rank ends such a job over gloo, so there `--every` is started
before. Bars: 95 % right, no other rank named; the last lines are the cost of `--pid` on 8 ranks: first answer below
5 s, below 1 % of the job's processor time.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "processes")]
WATCH = (sys.executable, "-m", "ddpdiag", "watch")
STALL = 5.0
FAULTS = ("sleep", "SIGKILL", "SIGSEGV", "abort", "gil", "raise", "async", "SIGTERM", "SIGINT", "SIGSTOP")
DEADLY = ("SIGKILL", "SIGSEGV", "abort", "SIGTERM")
TRAIN = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault, victim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])
if "KEEP" in os.environ:
    threading.Thread(target=time.sleep, args=(600,)).start()

def disturb():
    if fault == "sleep":
        time.sleep(600)
    elif fault == "gil":
        ctypes.PyDLL(None).sleep(600)
    elif fault == "abort":
        os.abort()
    elif fault == "raise":
        raise ValueError("a fault in the training")
    elif fault == "async":
        main = ctypes.c_ulong(threading.main_thread().ident)
        threading.Thread(
            target=lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(ValueError))
        ).start()
    else:
        os.kill(os.getpid(), getattr(signal, fault))

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
for step in range(100_000):
    if rank == victim and os.path.exists(folder + "/go") and not os.path.exists(folder + "/done"):
        open(folder + "/done", "w").close()
        disturb()
    model(torch.randn(32, 64)).sum().backward()
    time.sleep(float(os.environ.get("PAUSE", 0.05)))
    if rank == 0 and step % 10 == 0:
        print("step", step, flush=True)
dist.destroy_process_group()
"""


class Row(NamedTuple):
    """What one run came to."""

    named: str
    is_right: bool
    innocents: int
    seconds: float
    text: str


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def wait_until(path: Path, word: str = "", seconds: float = 120.0, *, after: int = 0) -> bool:
    """Wait until a file exists and has this word after its first characters."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and word in path.read_text()[after:]:
            return True
        time.sleep(0.1)
    return False


def named_ranks(text: str) -> set[int]:
    """The ranks that reports and closing sentences name."""
    flat = " ".join(text.split())
    titles = re.findall(r"ddpdiag watch: \S+ \d\d:\d\d:\d\d, [^:]+: (.*?)(?=ddpdiag watch:|$)", flat)
    titles = [title[:200] for title in titles if "the ranks move" not in title and "makes progress" not in title]
    words = [
        re.search(r"waits? for (ranks? \d[\d,-]*)", title) or re.match(r"(?:only )?(ranks? [\d,-]+)", title)
        for title in titles
    ]
    words += [
        re.search(r"the command failed \([^)]*\): (ranks? [\d,-]+)", flat),
        re.search(r"(ranks? [\d,-]+) ended first", flat),
    ]
    found = set()
    for match in filter(None, words):
        for part in match[1].split()[1].strip(",").split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def job(folder: Path, fault: str, victim: int, size: int, mode: str) -> Iterator[list[subprocess.Popen]]:
    """A job that trains, below `ddpdiag watch` or by hand."""
    from jobs import free_port

    (folder / "train.py").write_text(TRAIN)
    script = (str(folder / "train.py"), fault, str(victim), str(folder))
    port = str(free_port())
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        streams = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL, "start_new_session": True}
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", port)
        if mode == "watch":
            command = (*WATCH, "--stall", str(STALL), "--", *torchrun, *script)
            started = [subprocess.Popen(command, env=environment(), **streams)]
        elif mode == "torchrun":
            started = [subprocess.Popen((*torchrun, *script), env=environment(PAUSE="0"), **streams)]
        else:
            place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place |= {} if fault in DEADLY else {"KEEP": "1"}
            started = [
                subprocess.Popen(
                    (sys.executable, *script), env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)), **streams
                )
                for rank in range(size)
            ]
    try:
        if not wait_until(folder / "out", "step 10"):
            raise SystemExit(f"the job does not train: {(folder / 'err').read_text()[-2000:]}")
        yield started
    finally:
        for process in started:
            for signum in (signal.SIGCONT, signal.SIGTERM):
                process.send_signal(signum)
        end_all(folder)
        for process in started:
            process.kill()
            process.wait()


def end_all(folder: Path) -> None:
    """Kill the ranks that torchrun leaves."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def run_watch(folder: Path, fault: str, victim: int, size: int) -> tuple[str, float]:
    """The report or closing sentence of a job below `ddpdiag watch`, and the seconds from the fault to it."""
    with job(folder, fault, victim, size, "watch"):
        (folder / "go").touch()
        wait_until(folder / "done")
        begin, after = time.monotonic(), len((folder / "err").read_text())  # a busy machine is silent before
        word = "nothing new for" if fault in ("sleep", "gil", "SIGSTOP") else "the command failed"
        wait_until(folder / "err", word, 40, after=after)
        seconds = time.monotonic() - begin
        time.sleep(1.0)
        return (folder / "err").read_text()[after:], seconds


def run_pid(folder: Path, fault: str, victim: int, size: int) -> tuple[str, float]:
    """The report of `ddpdiag watch --pid` on a job by hand, and the seconds from its start to the report."""
    with job(folder, fault, victim, size, "hand") as ranks:
        command = [*WATCH, "--pid", str(ranks[(victim + 1) % size].pid)]
        if fault in DEADLY:
            with (folder / "report").open("w") as report:
                watch = subprocess.Popen([*command, "--every", "30"], stdout=report, stderr=subprocess.STDOUT)
            wait_until(folder / "report", "ddpdiag watch:")
            (folder / "go").touch()
            wait_until(folder / "done")
            begin = time.monotonic()
            for process in ranks:
                process.wait(90)
            watch.wait(60)
            return (folder / "report").read_text(), time.monotonic() - begin
        (folder / "go").touch()
        wait_until(folder / "done")
        time.sleep(STALL)
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr, time.monotonic() - begin


def row(mode: str, fault: str, victim: int, size: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        text, seconds = (run_watch if mode == "watch" else run_pid)(Path(folder), fault, victim, size)
    named = named_ranks(text)
    return Row(",".join(map(str, sorted(named))) or "-", named == {victim}, len(named - {victim}), seconds, text)


def processor_seconds(pids: Iterable[int]) -> float:
    """The processor time of these processes, with that of their children that have ended."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(sum(map(int, fields[11:15])) for fields in stats) / os.sysconf("SC_CLK_TCK")


def cost(size: int = 8) -> None:
    """Print the seconds to the first answer of --pid on a job that trains, and its share of the processor time."""
    with tempfile.TemporaryDirectory() as name, job(Path(name), "sleep", 0, size, "torchrun") as (torchrun,):
        begin = time.monotonic()
        subprocess.run([*WATCH, "--pid", str(torchrun.pid)], capture_output=True, check=False)
        print(f"first answer on {size} ranks: {time.monotonic() - begin:.1f} s (bar: 5 s)")
        found = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
        ranks = [*map(int, found.stdout.split())]
        command = [*WATCH, "--pid", str(torchrun.pid), "--every", "30"]
        watch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(15)  # it has started, and shown its first report
        start, before = processor_seconds([watch.pid]), processor_seconds(ranks)
        time.sleep(90)
        own, used = processor_seconds([watch.pid]) - start, processor_seconds(ranks) - before
        watch.terminate()
        watch.wait()
        print(f"processor time up to the first report: {start:.2f} s")
        print(f"in the next 90 s: {own:.2f} s, the job {used:.1f} s: {own / used:.2%} of the job's (bar: 1 %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--modes", default="watch,pid")
    parser.add_argument("--victims", default="0,middle,last")
    parser.add_argument("--no-cost", action="store_true")
    parser.add_argument("--texts", help="a folder for the reports of rows that are not right")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for `cmd &`, and so would the ranks
    print("| mode | ranks | fault | at rank | named | right | innocents | seconds |\n|---|--:|---|--:|---|---|--:|--:|")
    rows = []
    for mode in asked.modes.split(","):
        for size in map(int, asked.ranks.split(",")):
            for fault in asked.faults.split(","):
                for where in asked.victims.split(","):
                    victim = {"0": 0, "middle": size // 2, "last": size - 1}[where]
                    own = row(mode, fault, victim, size)
                    rows.append(own)
                    right = "yes" if own.is_right else "NO"
                    cells = (mode, size, fault, victim, own.named, right, own.innocents, f"{own.seconds:.1f}")
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                    if asked.texts and not own.is_right:
                        Path(asked.texts, f"{mode}-{size}-{fault}-{victim}.txt").write_text(own.text)
    if rows:
        right = sum(each.is_right for each in rows) / len(rows)
        innocents = sum(each.innocents for each in rows)
        print(f"{len(rows)} runs: {right:.0%} right (bar: 95 %), {innocents} innocents (bar: 0)")
    if not asked.no_cost:
        cost()


if __name__ == "__main__":
    main()
