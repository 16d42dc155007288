"""GitHub Actions obeys lines of a step's output: those that are ours to write, and no text of a log or recording."""

import io
from pathlib import Path

import pytest
from readers import HEALTHY

from ddpdiag.cli import judge
from ddpdiag.cli.edge import complain
from ddpdiag.cli.outputs import LintArgs, Outputs
from ddpdiag.lint import command as lint
from ddpdiag.render import files

HOSTILE = ("::error::x", "  ::add-mask::x", "\t::stop-commands::x", "\r::error::x", "a ##[error]x", "\n\n::error::x")


def is_obeyed(output: str) -> bool:
    """Whether the runner finds a command in a line, as its ActionCommand.cs reads it."""
    return any(line.lstrip().startswith("::") or "##[" in line for line in output.replace("\r", "\n").split("\n"))


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")


@pytest.mark.usefixtures("actions")
@pytest.mark.parametrize("text", HOSTILE)
def test_no_line_of_ours_is_a_command(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    assert is_obeyed(text)
    files.show(f"{text}\n", stream)
    files.write_if_ready(stream, f"{text}\n")
    files.write("-", f"{text}\n")
    complain(f"one line\n{text}")
    shown = capsys.readouterr()
    assert not is_obeyed(stream.getvalue() + shown.out + shown.err)
    assert stream.getvalue().count("x") == 2


def test_elsewhere_the_text_stays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    files.write("-", "::error::x\n")
    assert capsys.readouterr().out == "::error::x\n"


@pytest.mark.usefixtures("actions")
def test_no_recording_writes_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(HEALTHY.read_text().replace('"n0"', '"n0\\n::error::x\\n##[error]x"'))
    judge.run([str(path)], Outputs(details=True))
    judge.run([str(path)], Outputs(markdown="-"))
    shown = capsys.readouterr()
    assert not is_obeyed(shown.out + shown.err)


def test_an_annotation_is_one_line_without_escape_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a\x1b[2J,b.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('\x1b')\nmodel = DDP(model)\n")
    lint.run([str(script)], LintArgs(details=True, github=True))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert lines
    assert all(line.isprintable() and ",b.py" not in line and "%0AFix: " in line for line in lines)
