"""The first and the later starts of ddpdiag.pyz, beside the installed program.

    python tests/benchmarks/one_file.py --rounds 5

Builds the program from this tree, and prints its size and, for `ddpdiag host` and `ddpdiag explain`, the medians of:
the installed program; a first start, which unpacks to an empty cache; a later start; and a start without a place for
the cache, which unpacks to a temporary folder and removes it. In a round all run one right after the other, in an empty
environment. Seconds of a core depend less on what else runs. Nothing that depends on the machine is a test.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = {"host": ["host"], "explain": ["explain", str(ROOT / "tests/recordings/logs/own_name_is_loopback.log")]}


def core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds(command: list[str], folder: str, **variables: str) -> tuple[float, float]:
    """The seconds of a run, by the clock and of a core."""
    begin, used = time.perf_counter(), core_seconds()
    done = subprocess.run(command, cwd="/", env=variables | {"TMPDIR": folder}, capture_output=True, check=False)
    taken = time.perf_counter() - begin, core_seconds() - used
    if done.returncode not in (0, 1, 3):
        raise SystemExit(f"{command} left with {done.returncode}:\n{done.stdout.decode()}{done.stderr.decode()}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "-q", "--no-isolation", "--wheel", "-o", folder, str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        pyz, cache = f"{folder}/ddpdiag.pyz", f"{folder}/cache"
        subprocess.run([sys.executable, str(ROOT / ".ci/build_pyz.py"), str(wheel), pyz], check=True)
        print(f"ddpdiag.pyz: {os.path.getsize(pyz) / 1e6:.1f} MB, load at start {os.getloadavg()[0]:.1f}")
        installed = str(Path(sysconfig.get_path("scripts")) / "ddpdiag")
        for name, words in COMMANDS.items():
            times: dict[str, list[tuple[float, float]]] = {}
            for _ in range(rounds):
                shutil.rmtree(cache, ignore_errors=True)
                one_file = [sys.executable, "-I", pyz, *words]
                for case, command, variables in (
                    ("installed", [installed, *words], {}),
                    ("first start", one_file, {"XDG_CACHE_HOME": cache}),
                    ("later start", one_file, {"XDG_CACHE_HOME": cache}),
                    ("no cache", one_file, {"XDG_CACHE_HOME": "/dev/null"}),
                ):
                    times.setdefault(case, []).append(seconds(command, folder, **variables))
            for case, taken in times.items():
                wall, core = map(statistics.median, zip(*taken, strict=True))
                print(f"ddpdiag {name}, {case}: {wall:.2f} s, {core:.2f} s of a core")
            unpacked = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
        print(f"unpacked: {unpacked / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
