"""What `--help` shows of every command, letter by letter, on a terminal of 80 columns."""

import pytest
import typer
from typer import rich_utils
from typer.testing import CliRunner

from ddpdiag.cli.app import app

COMMANDS = sorted(typer.main.get_command(app).commands)


def helped(monkeypatch: pytest.MonkeyPatch, *words: str, option: str = "--help") -> str:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    # Typer reads these from the variables of CI services when it is imported.
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", None)
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", None)
    done = CliRunner().invoke(app, [*words, option], prog_name="ddpdiag")
    assert done.exit_code == 0
    return done.output


def test_the_help_of_all_commands(monkeypatch, golden):
    golden(helped(monkeypatch))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command(monkeypatch, golden, command):
    golden(helped(monkeypatch, command))


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name in ("check", "allreduce-bench", "train", "judge")]
)
def test_all_options_of_a_command(monkeypatch, golden, command):
    golden(helped(monkeypatch, command, option="--help-all"))


def test_the_help_of_check_fits_on_two_screens(monkeypatch):
    assert len(helped(monkeypatch, "check").splitlines()) <= 90
