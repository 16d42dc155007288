"""A healthy run of two ranks beside a stranger: it ends FIT, in time and small, or says exactly what happened."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import PLAIN, SQUATTING, TALKING, Target, under
from jobs import Job, by_hand

import ddpdiag
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control.server import control_ports

UNFINISHED = [name for name in PLAIN if name.endswith("but for a byte")]
ALL = PLAIN | TALKING | SQUATTING
SECONDS = 60.0
LARGEST_BYTES = 150 << 20


def attacked(
    folder: Path, address: str, attack: Callable[[Target], None], *options: str, prefix: tuple[str, ...] = ()
) -> tuple[list[Job], str, int]:
    """Two ranks beside an attack, all that they wrote, and the most bytes that rank 0 had; `address` is rank 0's."""
    port, run_id = free_port("127.0.0.1"), f"attacked-{os.getpid()}-{time.monotonic_ns()}"
    words = ("--run-id", run_id, "--budget", "40", "--select", "LCH001,LCH003,COL001", *options)
    jobs, largest, end = [], 0, time.monotonic() + SECONDS
    with under(attack, Target(run_id, control_ports(run_id, port, None), ddpdiag.__version__)):
        for rank in (0, 1):
            command = by_hand(rank, 2, port, *words, address=address)
            # Ranks of one host find rank 0 through the folder of the run.
            shared = {"HOME": str(folder), "TMPDIR": str(folder)}
            jobs.append(Job(folder / str(rank), command, shared, prefix=prefix))
        while not all(job.is_over() for job in jobs) and time.monotonic() < end:
            largest = max(largest, _largest_bytes(jobs[0].process.pid))
            time.sleep(0.05)
        for job in jobs:
            job.destroy()
    return jobs, "".join(job.told() for job in jobs), largest


def codes_of(jobs: list[Job]) -> list[int]:
    return [job.process.returncode for job in jobs]


def _largest_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


@pytest.mark.deep
@pytest.mark.parametrize("name", ALL)
def test_a_run_with_a_secret_does_not_notice(tmp_path: Path, name: str) -> None:
    jobs, said, largest = attacked(tmp_path, "127.0.0.1", ALL[name])
    assert codes_of(jobs) == [0, 0], said
    assert (jobs[0].report["verdict"], jobs[0].report["findings"]) == ("fit", []), said
    assert largest < LARGEST_BYTES
    assert [job.left_files() for job in jobs] == [[], []]
    assert {path.name for path in tmp_path.iterdir()} <= {"0", "1", ".local"}  # the key file is the exception


# Of a run without a secret anybody may be a part. It never has a bug, never runs what it is told, and says what it met.
CODES = {0, 1, 2, 3, 143}


@pytest.mark.deep
@pytest.mark.parametrize("name", [*TALKING, *SQUATTING])
def test_a_run_without_one_says_what_happened(tmp_path: Path, name: str) -> None:
    jobs, said, _largest = attacked(tmp_path, socket.gethostname(), ALL[name])
    assert {*codes_of(jobs)} <= CODES, said
    assert "Traceback" not in said
    assert "\x1b[31m" not in said
    assert len(said) < 100_000


@pytest.mark.deep
@pytest.mark.parametrize("name", UNFINISHED)
def test_unfinished_frames_keep_rank_0_small_without_a_secret(tmp_path: Path, name: str) -> None:
    jobs, said, largest = attacked(tmp_path, socket.gethostname(), ALL[name])
    assert codes_of(jobs) == [0, 0], said
    assert largest < LARGEST_BYTES


@pytest.mark.deep
def test_silent_connections_that_take_all_files_keep_no_rank_out(tmp_path: Path) -> None:
    # What is left to do then, the report, may need a file: the sentence says so, and no rank is blamed.
    limit = ("prlimit", "--nofile=256")
    jobs, said, _largest = attacked(tmp_path, "127.0.0.1", ALL["silent connections"], prefix=limit)
    codes = codes_of(jobs)
    assert any("collective done" in line for line in jobs[0].progress)
    assert codes == [0, 0] or (codes == [3, 3] and "this process may open 256 (ulimit -n)" in said), said
    assert "Traceback" not in said


@pytest.mark.deep
def test_where_a_secret_is_required_nothing_begins_without(tmp_path: Path) -> None:
    jobs, said, _largest = attacked(tmp_path, socket.gethostname(), lambda target: None, "--require-auth")
    assert codes_of(jobs) == [2, 2]
    assert said.count("--require-auth") == 2
    assert [job.left_files() for job in jobs] == [[], []]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
