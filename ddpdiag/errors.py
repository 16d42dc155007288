"""The errors that ddpdiag explains in one sentence, and the exit code of each.

    UserError                base class: one sentence for the user, no traceback
    +-- UsageError           2: wrong option, variable or file; nothing was run
    +-- OutputNotWritten     the verdict's code, but 3 for FIT: the run was judged, and an output could not be written
    +-- RunLost              3: this rank could not take part, or lost its connection to rank 0

UnfitError is part of the Python API: `ddpdiag.preflight()` raises it on every rank of a job that must not start.
Every other exception that reaches the CLI is a bug of ddpdiag and ends it with exit code 4.
"""

import signal
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdiag.model import Report


class ExitCode(IntEnum):
    """The exit codes of ddpdiag. torchrun turns any non-zero code into 1; `exit_code` in the JSON report keeps it."""

    FIT = 0
    UNFIT = 1
    USAGE = 2
    UNKNOWN = 3
    BUG = 4
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    TERMINATED = 143

    @classmethod
    def of_signal(cls, signum: int) -> "ExitCode":
        """The exit code after a signal that ends ddpdiag: INTERRUPTED for SIGINT, TERMINATED for any other signal."""
        return cls.INTERRUPTED if signum == signal.SIGINT else cls.TERMINATED


class UserError(Exception):
    """A failure that one sentence explains. `str(error)` is that sentence."""

    exit_code: int = ExitCode.USAGE


class UsageError(UserError):
    """Wrong input. The sentence says what is wrong, in which option, variable or file, and what was expected."""


class OutputNotWritten(UserError):
    """An output could not be written after a run. The exit code is the verdict's, but UNKNOWN if the verdict is FIT."""

    def __init__(self, sentence: str, verdict_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = verdict_code or ExitCode.UNKNOWN


class AbsentBackend(Exception):
    """The installed torch does not have the backend. A worker raises this error, and the trial's outcome records it."""


class RunLost(UserError):
    """The run continued without this rank, or this rank lost rank 0. `exit_code` is the exit code of this rank."""

    def __init__(self, sentence: str, exit_code: int = ExitCode.UNKNOWN) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class UnfitError(Exception):
    """The job must not start. `str(error)` is the verdict and its sentence; `report` says what is at fault."""

    def __init__(self, report: "Report") -> None:
        super().__init__(report)  # the only argument, so that the exception can be pickled
        self.report = report

    def __str__(self) -> str:
        return str(self.report)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Text to append to a sentence about an unknown word: "; did you mean nccl?". Empty if no known word is similar."""
    spelled = {each.lower(): each for each in known}
    return "".join(f"; did you mean {spelled[each]}?" for each in get_close_matches(word.lower(), spelled, n=1))
