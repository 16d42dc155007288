"""A program that is run for so long and no longer: what SIGKILL does not end, stuck in the kernel, is left behind."""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

_POLL_SECONDS = 0.01
_BURY_SECONDS = 0.2
_LARGEST_BYTES = 8 << 20


class Said(NamedTuple):
    """Exit code (negative: the signal), standard output and error."""

    code: int
    out: bytes
    err: str


def run(command: Sequence[str], end: float, given: bytes = b"") -> Said | None:
    """Run it until `end` of the monotonic clock; None if it took longer. OSError if it cannot be started.

    `given` is its standard input: a secret has no place among arguments, which everybody can list.
    """
    out, err, into = (os.memfd_create(name) for name in ("out", "err", "in"))
    try:
        os.write(into, given)
        os.lseek(into, 0, os.SEEK_SET)
        # Files, not pipes: nobody waits for what a killed child still has open.
        child = subprocess.Popen(command, stdin=into, stdout=out, stderr=err)
        while child.poll() is None:
            if time.monotonic() > end:
                child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_BURY_SECONDS)
                return None
            time.sleep(_POLL_SECONDS)
        return Said(child.returncode, os.pread(out, _LARGEST_BYTES, 0), os.pread(err, 4096, 0).decode(errors="replace"))
    finally:
        for descriptor in (out, err, into):
            os.close(descriptor)
