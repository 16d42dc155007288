"""What a terminal shows of a run that waits, in a pseudo-terminal."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

from jobs import CHECK, free_port


def test_a_rank_that_waits_says_for_whom(tmp_path):
    missing = {"0": b"waiting for rank 1 ", "1": b"rank 0 at 127.0.0.1"}
    with contextlib.ExitStack() as stack:
        runs = {rank: stack.enter_context(_waiting(rank, tmp_path)) for rank in missing}
        for rank, (process, terminal) in runs.items():
            seen, end = b"", time.monotonic() + 60
            while missing[rank] not in seen and time.monotonic() < end:
                seen += _rest(terminal)
            process.send_signal(signal.SIGINT)
            while process.poll() is None:
                seen += _rest(terminal)
            assert missing[rank] in seen, seen.decode()
            assert process.returncode == 130


@contextlib.contextmanager
def _waiting(rank, folder):
    """A rank of two, and the other end of its terminal."""
    ours, theirs = pty.openpty()
    place = ("--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    command = [sys.executable, *CHECK, "--rank", rank, "--join-timeout", "60", *place]
    environ = {"PATH": os.environ["PATH"], "TERM": "xterm", "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environ) as process:
        os.close(theirs)
        yield process, ours
    os.close(ours)


def _rest(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""
