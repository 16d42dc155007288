"""Python stacks of a process that did not end in time, from faulthandler's dump."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from ddpdiag.runtime.witness import THREAD_FILE

MOST_FRAMES = 64
MOST_THREADS = 16
MOST_THREAD_FRAMES = 16
_MOST_CHARACTERS = 160
# faulthandler writes these where it stops: after 100 frames of a thread, and after 100 threads.
_CUT, _THREADS_CUT = "  ...", "..."


class Stacks(NamedTuple):
    """Frames, innermost first, as "function (file:line)": of the main thread, and of each other thread."""

    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()


def read_stacks(dump: str) -> Stacks:
    """The stacks in a dump, which lists the oldest thread, that is the main one, last."""
    threads = _threads(dump)
    if not threads:
        return Stacks()
    *others, main = [*threads, []] if _THREADS_CUT in dump.splitlines() else threads
    own = [frames for frames in others if frames and not any(f"({THREAD_FILE}:" in frame for frame in frames)]
    kept = tuple(shortened(frames, MOST_THREAD_FRAMES) for frames in own[:MOST_THREADS])
    return Stacks(shortened(main, MOST_FRAMES), kept)


def shortened(frames: Sequence[str], most: int) -> tuple[str, ...]:
    """The innermost frames; of more than `most`, how many were left out."""
    left_out = len(frames) - most
    return tuple(frames) if left_out <= 0 else (*frames[:most], f"... and {left_out} more frames")


def _threads(dump: str) -> list[list[str]]:
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif threads and line.startswith("  File ") and ", line " in line:
            threads[-1].append(_frame(line))
        elif threads and line == _CUT:
            threads[-1].append("...")
    return threads


def _frame(line: str) -> str:
    path, _, rest = line.removeprefix('  File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({os.path.basename(path)}:{number})"[:_MOST_CHARACTERS]
