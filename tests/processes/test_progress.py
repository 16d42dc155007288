"""What a terminal shows of a run that waits, in a pseudo-terminal."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from jobs import CHECK, free_port


@pytest.mark.parametrize(("rank", "missing"), [(0, b"(rank 1)"), (1, b"rank 0 at 127.0.0.1")])
def test_a_rank_that_waits_says_for_whom(rank, missing, tmp_path):
    ours, theirs = pty.openpty()
    options = ("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    environ = {"PATH": os.environ["PATH"], "TERM": "xterm", "TMPDIR": str(tmp_path)}
    command = [sys.executable, *CHECK, "--rank", str(rank), "--board-wait", "60", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environ) as process:
        os.close(theirs)
        seen, end = b"", time.monotonic() + 60
        while missing not in seen and time.monotonic() < end:
            seen += _rest(ours)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            seen += _rest(ours)
    os.close(ours)
    assert missing in seen, seen.decode()
    assert process.returncode == 130


def _rest(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""
