"""Does TRN003 name the rank that the others wait for, with its class, and nobody where nobody is slow?

    python tests/benchmarks/stragglers.py [--runs 20] [--healthy 50]

Each run is a `ddpdiag check --select LCH003,TRN003` of its own on this machine. One rank is made slow from outside:

    data      its images come 30 ms later (tests/inject)
    compute   its loss takes 30 ms more of a core (tests/inject)
    cores     both ranks are pinned to a core each, and a process burns one of these

Runs of the kinds take turns, so that what else the machine does meets all of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "processes")]
CHECK = ("-m", "ddpdiag", "check", "--select", "LCH003,TRN003", "--json", "{json}")
SLOW_RANK = 1
HEAD = (
    "| slow | ranks | named, with the class | named, another class | others named | nobody named |\n"
    "|---|--:|--:|--:|--:|--:|"
)


def environment(**more: str) -> dict[str, str]:
    own = {"PYTHONPATH": f"{TESTS / 'inject'}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def standalone(ranks: int, **variables: str) -> list[dict]:
    """The findings of one run that ddpdiag starts itself."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [word.replace("{json}", str(report)) for word in CHECK]
        command = [sys.executable, *words, "--nproc-per-node", str(ranks)]
        told = environment(DDPDIAG_TEST_REACHED=f"{folder}/reached", **variables)
        subprocess.run(command, env=told, capture_output=True, check=False, timeout=120)
        return json.loads(report.read_text())["findings"]


def data(ranks: int) -> list[dict]:
    return standalone(ranks, DDPDIAG_TEST_FAULT=f"slow-data {SLOW_RANK}")


def compute(ranks: int) -> list[dict]:
    return standalone(ranks, DDPDIAG_TEST_FAULT=f"slow-compute {SLOW_RANK}")


def healthy(ranks: int) -> list[dict]:
    return standalone(ranks)


@contextmanager
def burning(core: int) -> Iterator[None]:
    """A process that uses a core all the time."""
    hog = subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()


def cores(_ranks: int) -> list[dict]:
    """By hand, since each rank has a core of its own."""
    from jobs import free_port

    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder, burning(SLOW_RANK):
        report = Path(folder) / "report.json"
        words = [word.replace("{json}", str(report)) for word in CHECK]
        place = ["--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        started = [
            subprocess.Popen(
                ["taskset", "-c", str(rank), sys.executable, *words, "--rank", str(rank), *place],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        for process in started:
            process.wait(timeout=120)
        return json.loads(report.read_text())["findings"]


KINDS: dict[str, tuple[int, Callable[[int], list[dict]]]] = {
    "data": (3, data),
    "compute": (3, compute),
    "cores": (2, cores),
}


def outcome(kind: str, findings: list[dict]) -> str:
    """What one run came to."""
    own = [finding for finding in findings if finding["code"] == "TRN003.straggler"]
    if not own:
        return "nobody"
    named = [finding for finding in own if finding["ranks"] == [SLOW_RANK]]
    if len(named) < len(own):
        return "others"
    return "right" if all(finding["evidence"]["class"] == kind for finding in named) else "class"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs with each slow rank (default: 20)")
    parser.add_argument("--healthy", type=int, default=50, help="runs with nobody slow (default: 50)")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="what is slow (default: all)")
    asked = parser.parse_args()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in asked.kinds}
    for _ in range(asked.runs):
        for kind in asked.kinds:
            ranks, run = KINDS[kind]
            counts[kind][outcome(kind, run(ranks))] += 1
    quiet: Counter[str] = Counter(outcome("", healthy(2)) for _ in range(asked.healthy))
    print(HEAD)
    for kind in asked.kinds:
        own = counts[kind]
        cells = (own["right"], own["class"], own["others"], own["nobody"])
        print(f"| {kind} | {KINDS[kind][0]} | " + " | ".join(map(str, cells)) + " |")
    named = sum(quiet.values()) - quiet["nobody"]
    print(f"| nobody | 2 | - | - | {named} | {quiet['nobody']} |")


if __name__ == "__main__":
    main()
