"""Files that are sourced and commands that are pasted: names of a recording are words in them, and nothing else."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs
from readers import HEALTHY

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli import judge
from ddpdiag.cli.outputs import Outputs
from ddpdiag.codec import read_recording
from ddpdiag.errors import UsageError
from ddpdiag.judgement import judge as judged
from ddpdiag.render import shell

FAILURES = sorted((HEALTHY.parent / "failures").glob("*.jsonl"))
ATTACK = "$(touch PWNED)"
SHELLS = [each for each in ("sh", "dash", "bash", "zsh") if shutil.which(each)]
VALUES = ["eth1\n'; touch PWNED; #", f"a'{ATTACK}", "`touch PWNED`", "=eth0", "\\", "a\tb\x1b"]
quoted = re.compile(r"'[^']*'")


def sourced(path: Path, command: Sequence[str], *, by: str) -> str:
    line = f'. ./{path.name} && exec "$@"'
    done = subprocess.run([by, "-c", line, by, *command], cwd=path.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    return done.stdout


@pytest.mark.parametrize("by", SHELLS)
@pytest.mark.parametrize("run_id", ["x\ntouch PWNED #", "x\rtouch PWNED", f"x\n{ATTACK}", "x\u2028y\x85z\\"])
def test_the_name_of_a_run_stays_in_the_comment(tmp_path: Path, run_id: str, by: str) -> None:
    recording = read_recording([HEALTHY])
    recording = structs.replace(recording, header=structs.replace(recording.header, run_id=run_id))
    report = judged(recording, all_checks())
    file = tmp_path / "workaround"
    file.write_text(shell.render(structs.replace(report, workarounds={"NCCL_P2P_DISABLE": "1"})))
    assert sourced(file, ["sh", "-c", 'printf "%s" "$NCCL_P2P_DISABLE"'], by=by) == "1"


@pytest.mark.parametrize("by", SHELLS)
@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_back_as_it_is(tmp_path: Path, value: str, by: str) -> None:
    file = tmp_path / "workaround"
    file.write_text("\n".join(shell.shell_lines({"NCCL_SOCKET_IFNAME": value})) + "\n")
    assert sourced(file, ["sh", "-c", 'printf "%s" "$NCCL_SOCKET_IFNAME"'], by=by) == value


def test_a_recording_whose_trials_set_other_variables_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(HEALTHY.read_text().replace('"env":{}', '"env":{"LD_PRELOAD":"./evil.so"}', 1))
    assert path.read_text() != HEALTHY.read_text()
    with pytest.raises(UsageError, match=r"sets LD_PRELOAD=./evil.so, which no check sets"):
        judge.run([str(path)], Outputs())


@pytest.mark.parametrize("path", FAILURES, ids=lambda path: path.stem)
def test_commands_of_a_fix_hold_names_as_words(tmp_path: Path, path: Path) -> None:
    hostile = tmp_path / path.name
    hostile.write_text(re.sub(r'"(n\d|eth\d)"', rf'"\1{ATTACK}"', path.read_text()))
    report = judged(read_recording([hostile]), all_checks())
    fixes = [finding.fix for finding in report.findings]
    assert fixes
    commands = [command for fix in fixes for command in re.findall(r"`([^`]*)`", fix)]
    commands += [line for _, line in shell.exclude_lines(report)]
    assert not [command for command in commands if ATTACK in quoted.sub("", command)]
