"""Time and memory of `ddpdiag explain` on the dumps of many ranks, beside `torchfrtrace`.

    python tests/benchmarks/many_dumps.py [--ranks 1024] [--entries 2000] [--reference-ranks 64]

One rank of the made-up job is behind. The bar of explain for 1,024 dumps of 2,000 entries: 10 s and 200 MB. The
reference reads fewer dumps, because it keeps all of them in memory. Needs 1 GB in the temporary folder.
"""

import argparse
import pickle
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

FRAMES = [{"name": f"forward_{n}", "filename": f"/opt/job/layers/layer_{n}.py", "line": 100 + n} for n in range(12)]


def dump(world_size: int, entry_count: int, *, is_behind: bool) -> bytes:
    """A dump as NCCL's watchdog writes it: each entry has a stack of 12 frames."""
    names = ("world", "tensor", "data")
    entries = [
        {
            "record_id": number, "pg_id": number % 3, "process_group": (str(number % 3), names[number % 3]),
            "collective_seq_id": number // 3 + 1, "p2p_seq_id": 0, "op_id": number,
            "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + number, "input_sizes": [[1024, 512]],
            "input_dtypes": ["Float"], "output_sizes": [[1024, 512]], "output_dtypes": ["Float"],
            "state": "completed" if number < entry_count - 3 else "scheduled", "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None, "retired": True, "timeout_ms": 600_000, "is_p2p": False,
            "frames": [dict(frame) for frame in FRAMES],
        }
        for number in range(entry_count - 6 * is_behind)
    ]  # fmt: skip
    groups = {
        str(n): {"name": str(n), "desc": name, "ranks": str([*range(world_size)])} for n, name in enumerate(names)
    }
    return pickle.dumps({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}, 2)


def measure(name: str, command: list[str], ranks: int) -> None:
    """Run a command, and print its time, the memory of its largest process, and the line of its output on the fault."""
    script = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    script += "sys.exit(f'{code} {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10}')"
    begin = time.perf_counter()
    completed = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    *_, last = completed.stderr.splitlines()
    code, megabytes = last.split()
    named = next((line for line in completed.stdout.splitlines() if "rank" in line and "error" in line), "")
    print(f"| {name} | {ranks:,} | {seconds:.1f} | {megabytes} | {code} | {named} |", flush=True)


def main() -> None:
    """Write the dumps, and run both programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--ranks", 1024), ("--entries", 2000), ("--reference-ranks", 64)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    print("| program | dumps | seconds | MB | exit code | names |\n|---|--:|--:|--:|--:|---|")
    programs = Path(sysconfig.get_path("scripts"))
    for name, command, ranks in (
        ("ddpdiag explain", [str(programs / "ddpdiag"), "explain"], options.ranks),
        ("ddpdiag explain", [str(programs / "ddpdiag"), "explain"], options.reference_ranks),
        ("torchfrtrace", [str(programs / "torchfrtrace"), "-p", "trace_"], options.reference_ranks),
    ):
        with tempfile.TemporaryDirectory() as folder:
            usual, behind = (dump(ranks, options.entries, is_behind=each) for each in (False, True))
            for rank in range(ranks):
                Path(folder, f"trace_{rank}").write_bytes(behind if rank == ranks // 2 else usual)
            measure(name, [*command, folder], ranks)


if __name__ == "__main__":
    main()
