"""A pipe of our own in place of standard output or error, where somebody may wait for the end of the one that we got.

    passages = open_passages()
    if os.fork() == 0:
        [passage.enter() for passage in passages]
    [passage.begin() for passage in passages]
    ...                                                     # the child has ended, or is given up
    [passage.end(seconds) for passage in passages]

bash's $( ) and subprocess.run read until the last process that has the pipe open has ended. One that survives SIGKILL,
stuck in the kernel, would hold them up for ever; of ours nobody waits for the end.
"""

import os
import select
import stat
import threading
from collections.abc import Sequence

_BLOCK_BYTES = 65536


class Passage:
    """What is written to `outer` (the first of them is used) in another process reaches it by way of this one."""

    def __init__(self, outer: tuple[int, ...]) -> None:
        self.outer = outer
        self._source, self._inner = os.pipe()
        self._stopped, self._stop = os.pipe()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def enter(self) -> None:
        """In the child: write to us."""
        for descriptor in self.outer:
            os.dup2(self._inner, descriptor)
        for descriptor in (self._source, self._inner, self._stopped, self._stop):
            os.close(descriptor)

    def begin(self) -> None:
        """In the parent, after the fork: pass on what comes."""
        os.close(self._inner)
        self._thread.start()

    def end(self, seconds: float) -> bool:
        """Pass on what is there by now; False where the reader did not take it in this time.

        OSError where standard output could not be written; BrokenPipeError: its reader left.
        """
        os.close(self._stop)
        self._thread.join(max(seconds, 0))
        if self._error is not None and self.outer[0] == 1:
            raise self._error
        return not self._thread.is_alive()

    def _carry(self) -> None:
        try:
            # Only once nothing is there any more does the end count.
            while self._source in select.select([self._source, self._stopped], [], [])[0]:
                if not (block := os.read(self._source, _BLOCK_BYTES)):
                    return
                self._write(block)
        except OSError as error:
            self._error = error
        finally:
            os.close(self._source)  # so the child learns, too, that the reader left

    def _write(self, block: bytes) -> None:
        while block:
            try:
                block = block[os.write(self.outer[0], block) :]
            except BlockingIOError:  # whoever shares the pipe with us made it so
                select.select([], [self.outer[0]], [])


def open_passages() -> Sequence[Passage]:
    """One for each pipe or socket that standard output and error are; one for both where they are the same."""
    pipes = {descriptor: os.fstat(descriptor) for descriptor in (1, 2) if _has_a_reader(descriptor)}
    if len(pipes) == 2 and os.path.samestat(pipes[1], pipes[2]):
        return (Passage((1, 2)),)  # what is said stays in order
    return tuple(Passage((descriptor,)) for descriptor in pipes)


def _has_a_reader(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
