"""--nagios at the edge: every end is one of four, and each says so in a line."""

import subprocess
import sys

import pytest

from ddpdiag.cli.edge import guarded
from ddpdiag.errors import RunLost, UsageError
from ddpdiag.render.nagios import State


def fails(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("state", list(State))
def test_a_verdict_keeps_its_code(state: State) -> None:
    assert guarded(lambda: state, nagios=True) == state


@pytest.mark.parametrize(
    "error",
    [
        UsageError("--budget nan: a reason"),
        RunLost("rank 0 was lost", 143),
        SystemExit(2),
        OSError(28, "No space left on device"),
        ZeroDivisionError(),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_verdict_is_unknown(golden, error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: fails(error), nagios=True) == State.UNKNOWN
    golden(capsys.readouterr().out)


def test_without_the_option_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: fails(UsageError("no")), nagios=False) == 2
    assert capsys.readouterr().out == ""


def test_arguments_that_cannot_be_read_are_unknown(golden) -> None:
    done = looked("--nagios", "--no-such-option")
    assert done.returncode == State.UNKNOWN
    golden(done.stdout)
    assert looked("--nagios", "--help").returncode == 0


def looked(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ddpdiag", "host", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_that_cannot_be_written_is_unknown_in_the_line_and_in_the_code() -> None:
    done = looked("--nagios", "--json", "/dev/full")
    assert done.returncode == State.UNKNOWN
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("DDPDIAG UNKNOWN - cannot write /dev/full")


def test_a_mistyped_option_is_no_critical_state() -> None:
    done = looked("--nagios", "--budgets")
    assert (done.returncode, done.stdout.count("\n")) == (State.UNKNOWN, 1)
    assert "--budgets" in done.stderr
