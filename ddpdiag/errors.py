"""The errors that ddpdiag explains, and the exit code of each.

    UserError            base: one sentence for the user, no traceback
    +-- UsageError       2: wrong option, variable or file; nothing was run
    +-- Unwritten        the verdict's, 3 for FIT: the run was judged, and an output could not be written
    +-- RunLost          3: this rank could not take part, or lost rank 0, so nothing is known

Everything else that reaches the CLI edge is our own bug and ends with 4.
"""

import signal
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    """The codes that scripts rely on; torchrun turns any non-zero one into 1, `exit_code` in JSON stays."""

    FIT = 0
    UNFIT = 1
    USAGE = 2
    UNKNOWN = 3
    BUG = 4
    INTERRUPTED = 130
    TERMINATED = 143

    @classmethod
    def of_signal(cls, signum: int) -> "ExitCode":
        """Of a process that a signal told to end: SIGHUP and SIGTERM are one to whoever reads it."""
        return cls.INTERRUPTED if signum == signal.SIGINT else cls.TERMINATED


class UserError(Exception):
    """A failure that one sentence explains; `str()` of it is that sentence."""

    exit_code: int = ExitCode.USAGE


class UsageError(UserError):
    """Bad input: the sentence names what, where, and what was expected."""


class Unwritten(UserError):
    """An output could not be written after a run: the verdict's code stays, and FIT, which waits for it, is UNKNOWN."""

    def __init__(self, sentence: str, verdict_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = verdict_code or ExitCode.UNKNOWN


class AbsentBackend(Exception):
    """This torch does not have the backend. In a worker, where it is an outcome."""


class RunLost(UserError):
    """The run went on without this rank, or ended without rank 0; `exit_code` is this rank's exit code."""

    def __init__(self, sentence: str, exit_code: int = ExitCode.UNKNOWN) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word, such as "; did you mean nccl?"; empty if no known one is like it."""
    spelled = {each.lower(): each for each in known}
    return "".join(f"; did you mean {spelled[each]}?" for each in get_close_matches(word.lower(), spelled, n=1))
