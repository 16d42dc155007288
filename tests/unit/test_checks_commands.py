"""Commands that manual pages and remedies of the checks tell the reader to type."""

import re
from pathlib import Path

import pytest
import typer

import ddpdiag
from ddpdiag.checks.api import Stage
from ddpdiag.checks.registry import module_of
from ddpdiag.cli.app import app
from ddpdiag.cli.parsing import declared_name

ROOM = Path(ddpdiag.__file__).parent
HOMES = ("checks", "bench", "strategies")
SOURCES = {path.relative_to(ROOM.parent): path.read_text() for home in HOMES for path in (ROOM / home).rglob("*.py")}
COMMANDS = sorted(
    {
        command
        for text in SOURCES.values()
        for command in re.findall(r"`ddpdiag (check [^`]*)`", text.replace("\n", " "))
    }
)
OPTIONS = {
    option
    for parameter in typer.main.get_command(app).commands["check"].params
    for option in getattr(parameter, "opts", ())
}


def test_some_commands_are_found():
    assert "check --stage collective" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_options_and_stages_that_exist(command):
    assert {f"--{declared_name(name)}" for name in re.findall(r"--([a-z-]+)", command)} <= OPTIONS
    stages = {stage for named in re.findall(r"--stage ([a-z0-9,]+)", command) for stage in named.split(",")}
    assert stages <= {stage.value for stage in Stage}


def test_thresholds_that_are_named_are_read():
    for code, name in {
        pair for text in SOURCES.values() for pair in re.findall(r"--set ([A-Z0-9]{3}\d{3})\.(\w+)", text)
    }:
        file = Path(module_of(code).replace(".", "/")).with_suffix(".py")
        home = [path for path in SOURCES if path.parent == file.parent] if file.name == "check.py" else [file]
        assert any(f'setting("{name}"' in SOURCES[path] for path in home)
