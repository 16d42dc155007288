"""A healthy run of two ranks beside a stranger: it ends FIT, in time and small, or says exactly what happened."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import PLAIN, SQUATTING, TALKING, Target, under

import ddpdiag
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.server import control_ports

FIRST = ("frames without end", "silent connections")
UNFINISHED = [name for name in PLAIN if name.endswith("but for a byte")]
ALL = PLAIN | TALKING | SQUATTING
SECONDS = 60.0
LARGEST_BYTES = 150 << 20


class Attacked:
    """Two ranks, started by hand, as if in two shells; `address` is rank 0's, `open_files` the limit of each."""

    def __init__(
        self, folder: Path, address: str, *options: str, open_files: int | None = None, **variables: str
    ) -> None:
        self.port = free_port("127.0.0.1")
        self.run_id = f"attacked-{os.getpid()}-{time.monotonic_ns()}"
        ports = control_ports(self.run_id, self.port, None)
        self.target = Target(self.run_id, ports, ddpdiag.__version__)
        self.json = folder / "report.json"
        self._address, self._options = address, options
        self._prefix = () if open_files is None else ("prlimit", f"--nofile={open_files}")
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "HOME": str(folder), **variables}

    def run(self, attack: Callable[[Target], None]) -> tuple[list[int], str, int]:
        """Exit codes, everything that was said, and the largest memory of rank 0 in bytes."""
        with under(attack, self.target):
            ranks = [self._start(rank) for rank in (0, 1)]
            largest = 0
            end = time.monotonic() + SECONDS
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
                largest = max(largest, _largest_bytes(ranks[0].pid))
                time.sleep(0.05)
            for rank in ranks:
                rank.kill()
            said = "".join(rank.communicate()[0] for rank in ranks)
        return [rank.returncode for rank in ranks], said, largest

    def _start(self, rank: int) -> "subprocess.Popen[str]":
        place = ("--rank", str(rank), "--world-size", "2", "--local-rank", str(rank), "--run-id", self.run_id)
        where = ("--master-addr", self._address, "--master-port", str(self.port), "--budget", "40")
        out = ("--json", str(self.json)) if rank == 0 else ()
        command = (sys.executable, "-m", "ddpdiag", "check", *place, *where, *out, "--select", "LCH001,LCH003,COL001")
        pipe, merged = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            [*self._prefix, *command, *self._options],
            stdout=pipe,
            stderr=merged,
            text=True,
            env=self._environ,
            errors="replace",
        )


def _largest_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.deep) for n in ALL])
def test_a_run_with_a_secret_does_not_notice(tmp_path: Path, name: str) -> None:
    attacked = Attacked(tmp_path, "127.0.0.1")
    codes, said, largest = attacked.run(ALL[name])
    assert codes == [0, 0], said
    report = json.loads(attacked.json.read_text())
    assert (report["verdict"], report["findings"]) == ("fit", []), said
    assert largest < LARGEST_BYTES
    assert {path.name for path in tmp_path.iterdir()} <= {"report.json", ".local"}  # the key file is the exception


# Of a run without a secret anybody may be a part. It never has a bug, never runs what it is told, and says what it met.
CODES = {0, 1, 2, 3, 143}


@pytest.mark.deep
@pytest.mark.parametrize("name", [*TALKING, *SQUATTING])
def test_a_run_without_one_says_what_happened(tmp_path: Path, name: str) -> None:
    attacked = Attacked(tmp_path, socket.gethostname())
    codes, said, _largest = attacked.run(ALL[name])
    assert set(codes) <= CODES, said
    assert "Traceback" not in said
    assert "\x1b[31m" not in said
    assert len(said) < 100_000


@pytest.mark.deep
@pytest.mark.parametrize("name", UNFINISHED)
def test_unfinished_frames_keep_rank_0_small_without_a_secret(tmp_path: Path, name: str) -> None:
    codes, said, largest = Attacked(tmp_path, socket.gethostname()).run(ALL[name])
    print(f"rank 0 had {largest >> 20} MiB at most")
    assert codes == [0, 0], said
    assert largest < LARGEST_BYTES


@pytest.mark.deep
def test_silent_connections_that_take_all_files_keep_no_rank_out(tmp_path: Path) -> None:
    # What is left to do then, the report, may need a file: the sentence says so, and no rank is blamed.
    codes, said, _largest = Attacked(tmp_path, "127.0.0.1", open_files=256).run(ALL["silent connections"])
    assert "collective done" in said
    assert codes == [0, 0] or (codes == [3, 3] and "this process may open 256 (ulimit -n)" in said), said
    assert "Traceback" not in said


@pytest.mark.deep
def test_where_a_secret_is_required_nothing_begins_without(tmp_path: Path) -> None:
    attacked = Attacked(tmp_path, socket.gethostname(), "--require-auth")
    codes, said, _largest = attacked.run(lambda target: None)
    assert codes == [2, 2]
    assert said.count("--require-auth") == 2
    assert list(tmp_path.iterdir()) == []
