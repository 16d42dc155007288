"""What a terminal shows of a run that waits, in a pseudo-terminal."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from jobs import CHECK, free_port


@pytest.mark.parametrize(
    ("rank", "words"), [(0, b"1 of 2 came, 1 missing (rank 1)"), (1, b"rank 1 looks for rank 0 at 127.0.0.1")]
)
def test_a_rank_that_waits_says_for_whom(rank, words, tmp_path):
    ours, theirs = pty.openpty()
    options = ("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    environ = {"PATH": os.environ["PATH"], "TERM": "xterm", "TMPDIR": str(tmp_path)}
    command = [sys.executable, *CHECK, "--rank", str(rank), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environ) as process:
        os.close(theirs)
        seen, end = b"", time.monotonic() + 12
        while words not in seen and time.monotonic() < end:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            seen += _rest(ours)
    os.close(ours)
    assert words in seen, seen.decode()
    assert process.returncode == 130


def _rest(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""
