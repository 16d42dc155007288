"""--nagios at the edge: every end is one of four, and each says so in a line."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddpdiag.cli.plugin import guarded, unparsed
from ddpdiag.errors import RunLost, UsageError
from ddpdiag.render.nagios import State

HEALTHY = Path(__file__).parents[1] / "recordings" / "healthy-2-ranks.jsonl"


def fails(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("state", list(State))
def test_a_verdict_keeps_its_code(state: State) -> None:
    assert guarded(lambda: state, nagios=True) == state


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("--budget nan: expected a number"), "--budget nan: expected a number"),
        (RunLost("rank 0 was lost", 143), "rank 0 was lost"),
        (SystemExit(2), "it failed; standard error says why"),
        (OSError(28, "No space left on device"), "it failed; standard error says why"),
        (ZeroDivisionError(), "it failed; standard error says why"),
        (KeyboardInterrupt(), "it failed; standard error says why"),
    ],
)
def test_what_is_no_verdict_is_unknown(error: BaseException, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: fails(error), nagios=True) == State.UNKNOWN
    assert capsys.readouterr().out == f"DDPDIAG UNKNOWN - {line}\n"


def test_without_the_option_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: fails(UsageError("no")), nagios=False) == 2
    assert capsys.readouterr().out == ""


def test_arguments_that_cannot_be_read_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert unparsed(2) == State.UNKNOWN
    assert capsys.readouterr().out.startswith("DDPDIAG UNKNOWN - wrong usage")
    assert unparsed(0) == 0  # --help


def judged(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ddpdiag", "judge", str(HEALTHY), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_recording_is_judged_as_a_plug_in() -> None:
    done = judged("--nagios")
    assert done.returncode in (State.OK, State.WARNING)
    assert done.stdout.startswith(f"DDPDIAG {State(done.returncode).name} - 2 ranks on 1 host")
    assert done.stdout.count("\n") == 1
    assert " | seconds=" in done.stdout


def test_a_file_that_cannot_be_written_is_unknown_in_the_line_and_in_the_code() -> None:
    done = judged("--nagios", "--json", "/dev/full")
    assert done.returncode == State.UNKNOWN
    said, sentence = done.stdout.split("; ")
    assert said == "DDPDIAG UNKNOWN - cannot write /dev/full: No space left on device"
    assert sentence.startswith("2 ranks on 1 host")
    assert sentence.endswith("\n")


def test_a_mistyped_option_is_no_critical_state() -> None:
    done = judged("--nagios", "--budgets")
    assert (done.returncode, done.stdout.count("\n")) == (State.UNKNOWN, 1)
    assert "No such option" in done.stderr


def test_a_recording_gives_metrics_and_cases(tmp_path: Path) -> None:
    done = judged("--prometheus", str(tmp_path / "a.prom"), "--junit", str(tmp_path / "a.xml"))
    assert done.returncode == 0
    assert 'ddpdiag_verdict{verdict="fit"} 1.0' in (tmp_path / "a.prom").read_text()
    assert '<testsuites name="ddpdiag"' in (tmp_path / "a.xml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.prom", "a.xml"]
