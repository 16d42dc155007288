"""Hostile logs: endless lines, lines that nearly match, characters that terminals obey; time and memory are bounded.

In the default tier 512 KiB of each, `-m long` 5 MiB of each. A child process reads them all; it may take 30 s of
processor time for each, and 300 MB.
Run by hand, this file prints what each log took: python tests/security/test_hostile_logs.py 5120
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdiag.explain.card import all_cards
from ddpdiag.explain.matcher import explain_log
from ddpdiag.explain.render import render

LOG_SECONDS, MEMORY_BYTES = 30, 300_000_000
_PIECE_BYTES = 1 << 16

# Each is repeated until the log is long enough; most nearly match a card, a prefix or a traceback.
REPEATED = {
    "endless": b"x",
    "brackets": b"[",
    "tags": b"[1,1]<stderr>:",
    "empty lines": b"\n",
    "carriage returns": b"CUDA error: \r",
    "near errors": b"CUDA error: \nNCCL WARN\n",
    "bare errors": b"Error: \n",
    "metrics": b"MeanSquaredError: 0.01\n",
    "tracebacks": b"Traceback (most recent call last)\n",
    "frames": b'Traceback (most recent call last):\n  File "a", line 1\n',
    "mixed ranks": b"[rank0]: Traceback (most recent call last)\n[rank1]:   x\n",
    "NUL": b"\0",
    "no UTF-8": b"\xff\xfe",
    "escape codes": b"\x1b[31m\x1b]0;title\x07",
    "open escape codes": b"\x1b[1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1",
    "open JSON": b'{"log":"',
    "JSON backslashes": b'{"log":"\\\\',
    "JSON": b'{"message": "Error: x\\n\\u00e9", "a": 1}\n',
    "ranks": b"[rank1]: NCCL WARN a\n",
    "networks": b"NET/OFI x\n",
    "anchors on lines": b"".join(card.anchor.encode() + b"\n" for card in all_cards()),
    "anchors on one line": b" ".join(card.anchor.encode() for card in all_cards()),
    "examples": b"".join(card.example.encode() + b"\n" for card in all_cards()),
}


def pieces(repeated: bytes, size: int) -> Iterator[bytes]:
    piece = repeated * (_PIECE_BYTES // len(repeated) + 1)
    for _ in range(size // len(piece) + 1):
        yield piece


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read_all(size: int) -> None:
    """Read every log; the name of one that takes too long or too much is the last on standard error."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for name, repeated in REPEATED.items():
        sys.stderr.write(f"{name}\n")
        begin = cpu_seconds()
        # The kernel ends the process by SIGXCPU.
        resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + 1 + LOG_SECONDS, resource.RLIM_INFINITY))
        found = explain_log(pieces(repeated, size), "job.log")
        page = render([found], width=80, color=False)
        assert not set(page) & {"\x00", "\x1b", "\x07", "\r"}
        seconds, megabytes = cpu_seconds() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:<20} {seconds:6.2f} s of CPU, {len(found.sightings):3} texts, at most {megabytes:.0f} MiB so far")


@pytest.mark.parametrize("kibibytes", [64, pytest.param(5120, marks=pytest.mark.long)])
def test_hostile_logs_are_read_in_bounded_time_and_memory(kibibytes: int) -> None:
    done = subprocess.run([sys.executable, __file__, str(kibibytes)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    read_all(int(sys.argv[1]) << 10)
