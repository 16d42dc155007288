"""Who may use the machine's cores beside others, where workers of pytest-xdist run tests at once.

All tests share the cores, but for those marked `alone`, which wait until nobody else runs, and for which all wait.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RUN = "PYTEST_XDIST_TESTRUNUID"  # one for all workers of a run; absent without them


def place(run: str) -> Path:
    """The folder of a run's locks, which the run's own process removes at the end."""
    return Path(tempfile.gettempdir()) / f"ddpdiag-tests-{run}"


@contextmanager
def cores(*, alone: bool = False) -> Iterator[None]:
    """Hold the cores, shared or alone. One process of tests has them anyway."""
    if (run := os.environ.get(_RUN)) is None:
        yield
        return
    folder = place(run)
    folder.mkdir(exist_ok=True)
    with (folder / "turn").open("w") as turn, (folder / "cores").open("w") as lock:
        # Whoever waits for the cores holds the turn, so that those who come later do not overtake it for ever.
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Closing is not enough: who was forked meanwhile has it open, too.
            fcntl.flock(lock, fcntl.LOCK_UN)
