"""Options, documented commands, and streams that cannot be written. Nothing is run but `explain`."""

import ast
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import ddpdiag
from ddpdiag.checks.registry import all_checks
from ddpdiag.cli import judge as judge_command
from ddpdiag.cli import main
from ddpdiag.cli.app import app
from ddpdiag.cli.check import _absolute_path
from ddpdiag.cli.edge import complain, guarded
from ddpdiag.cli.options import Color, split_at_commas
from ddpdiag.cli.outputs import Outputs, publish, show, terminal_style
from ddpdiag.cli.parsing import declared_name
from ddpdiag.codec import disassemble, encode, indented_json, read_recording
from ddpdiag.errors import ExitCode, OutputNotWritten, UsageError
from ddpdiag.judgement import judge
from ddpdiag.judgement.reading import read_report
from ddpdiag.judgement.selection import validate
from ddpdiag.model import RunOptions

ROOT = Path(__file__).parents[2]
HEALTHY = Path(__file__).parents[1] / "recordings" / "healthy-2-ranks.jsonl"
GROUP = typer.main.get_command(app)
# What documentation writes for a number, a host, a code.
PLACEHOLDERS = {"R": "0", "I": "0", "N": "2", "HOST": "h", "CODE": "COL001", "SECONDS": "60"}


def _texts(node: ast.AST) -> Iterator[str]:
    """The string literals of a module, f-strings with an x for each value."""
    for child in ast.walk(node):
        match child:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in values)


def _documented() -> Iterator[str]:
    """Every `... ddpdiag ...` command in texts (manual pages, fixes, errors), in the README and docs, and in --help."""
    sources = [path.read_text() for path in sorted(Path(ddpdiag.__path__[0]).rglob("*.py"))]
    # To parse takes 10 ms.
    texts = [text for source in sources if "ddpdiag " in source for text in _texts(ast.parse(source))]
    pages = [page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    for text in [*texts, *pages]:
        yield from re.findall(r"`((?:[^`\n]* )?ddpdiag [^`]*)`", text)
    for page in pages:
        yield from re.findall(r"^(?:\$ )?(.*\bddpdiag (?:check|judge|explain) .*)$", page, re.MULTILINE)
    for command in (GROUP, *GROUP.commands.values()):
        yield from (line for line in (command.epilog or "").split("\n\n") if "ddpdiag" in line)


def _commands() -> list[tuple[str, ...]]:
    """The words after `ddpdiag` of each."""
    found = set()
    for line in _documented():
        tail = re.split(r"\bddpdiag (?=[a-z])", line.partition("   ")[0], maxsplit=1)
        if len(tail) == 2 and not line.lstrip().startswith("|"):
            words = shlex.split(re.split(r"[`|]", tail[1])[0])
            found.add(tuple(PLACEHOLDERS.get(word.rstrip(",."), word) for word in words))
    # A bare name, as in "what `ddpdiag judge` does", need not be complete.
    return sorted(words for words in found if len(words) > 1 and words[0] in GROUP.commands)


COMMANDS = _commands()


def parsed(*words: str) -> dict[str, object]:
    name, *arguments = words
    parent = typer.Context(GROUP, **GROUP.context_settings)
    return GROUP.commands[name].make_context(name, arguments, parent=parent).params


def test_documented_commands_are_found() -> None:
    assert len(COMMANDS) > 10
    assert ("check", "--stage", "gpu,collective") in COMMANDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_documented_command_is_understood(words: tuple[str, ...]) -> None:
    options = parsed(*words)
    if words[0] == "check":
        lists = {name: split_at_commas(options[name] or ()) for name in ("stage", "skip_stage", "select", "ignore")}
        validate(
            RunOptions(
                stages=lists["stage"], skip_stages=lists["skip_stage"], select=lists["select"], ignore=lists["ignore"]
            ),
            all_checks(),
        )


def test_the_command_line_suits_click_8_1():
    """Typer 0.15 is bound to it. It refuses a default of several words, and normalizes other defaults."""
    arguments = [each for command in GROUP.commands.values() for each in command.params if each.nargs == -1]
    assert [each.default for each in arguments if each.default is not None] == []
    assert len(arguments) > 4
    assert declared_name(Color.AUTO) == "auto"


def test_a_budget_in_which_nothing_can_be_measured_is_refused() -> None:
    with pytest.raises(Exception, match="x>=5"):
        parsed("check", "--budget", "4.9")
    assert parsed("check", "--budget", "5")["budget"] == 5


def test_a_path_that_json_cannot_hold_is_refused(golden) -> None:
    with pytest.raises(UsageError) as caught:
        _absolute_path("--shared-dir", os.fsdecode(b"/tmp/\xff"))
    golden(str(caught.value))
    assert _absolute_path("--shared-dir", "/tmp/ä") == "/tmp/ä"


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def shown_on(stream: io.TextIOBase | None) -> None:
    recording = read_recording([HEALTHY])
    publish(judge(recording, all_checks()), disassemble(recording), Outputs(), stream, None)


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def test_a_quiet_run_whose_json_is_on_standard_output_prints_nothing_else(capsys) -> None:
    recording = read_recording([HEALTHY])
    outputs, stderr = Outputs(quiet=True, json="-"), io.StringIO()
    publish(judge(recording, all_checks()), disassemble(recording), outputs, sys.stdout, stderr)
    assert capsys.readouterr().out.startswith("{")
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("stream", [Full(), closed(), None], ids=["full", "closed", "none"])
def test_a_report_that_cannot_be_shown_is_explained(golden, stream: io.TextIOBase | None) -> None:
    with pytest.raises(OutputNotWritten) as caught:
        shown_on(stream)
    assert caught.value.exit_code == ExitCode.UNKNOWN  # of a run that is FIT
    golden(str(caught.value))


def test_what_a_name_holds_is_no_command_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain("rank 1 on n0\x1b]0;title\x07\x9b2J\u202e: refused")
    assert capsys.readouterr().err == "ddpdiag: rank 1 on n0\\x1b]0;title\\x07\\x9b2J\\u202e: refused\n"


def test_what_an_encoding_cannot_hold_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii")
    show("10 µs \udcff\n", stream)
    assert raw.getvalue() == b"10 \\xb5s \\udcff\n"


def test_where_letters_are_few_tables_keep_their_form() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "latin-1")
    show("n0 \u2013 2.67\nn1 \u2588\u2588\u258f3.00\n", stream)
    assert raw.getvalue() == b"n0 - 2.67\nn1 ## 3.00\n"


class Screen(io.StringIO):
    """A terminal of unknown width, which is taken for 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_complaint_is_wrapped_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "rank 1 on vm did not reach rank 0 at 127.0.0.1 within 15 s: nobody listens there " * 2
    said = []
    for stream in (Screen(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        complain(f"{sentence.strip()}\n  File x")
        said.append(stream.getvalue())
    on_screen, in_log = said
    assert max(map(len, on_screen.splitlines())) <= 80
    assert on_screen.split() == in_log.split()
    assert on_screen.endswith("\n  File x\n")
    assert in_log == f"ddpdiag: {sentence.strip()}\n  File x\n"


@pytest.mark.parametrize(
    ("stream", "when", "environ", "expected"),
    [
        (Screen(), Color.AUTO, {}, True),
        (Screen(), Color.AUTO, {"NO_COLOR": "1"}, False),
        (Screen(), Color.ALWAYS, {"NO_COLOR": "1"}, True),
        (Screen(), Color.NEVER, {}, False),
        (io.StringIO(), Color.AUTO, {}, False),
        (io.StringIO(), Color.ALWAYS, {}, True),
        (Screen(), Color.AUTO, {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, when: Color, environ: dict[str, str], expected: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert terminal_style(stream, when)[1] is expected


def test_a_full_disk_is_no_bug(golden, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> int:
        raise OSError(28, "No space left on device", "/tmp/x")

    assert guarded(write) == 2
    golden(capsys.readouterr().err)
    monkeypatch.setattr(sys, "stdout", Full())
    assert guarded(lambda: 1) == 1  # the verdict stands


def test_a_text_that_another_module_exits_with_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: sys.exit("random.py of another project")) == ExitCode.BUG
    assert capsys.readouterr().err == "ddpdiag: random.py of another project\n"
    assert guarded(lambda: sys.exit(None)) == 0


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_bug(golden, redirection: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m ddpdiag judge {shlex.quote(str(HEALTHY))} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == (ExitCode.FIT if redirection == "2>&-" else ExitCode.UNKNOWN)
    golden(done.stderr)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--version",
        "check --help",
        "manual",
        "checks",
        "explain COL001",
        "explain LNT010",
        "explain {run}",
        "explain 'NCCL WARN Duplicate GPU detected'",
        "history {folder}",
        "history {folder} --json -",
        "lint {script}",
        "lint {script} --json -",
        "lint {script} --github",
        "compare {run} {run}",
        "compare {run} {run} --json -",
        "judge {run}",
        "judge {run} --json -",
        "judge {run} --markdown - --quiet",
        "ticket nccl {run}",
        "simulate --hosts 2",
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(words, tmp_path, monkeypatch, capsys) -> None:
    paths = {"run": HEALTHY, "folder": HEALTHY.parent, "script": tmp_path / "train.py"}
    paths["script"].write_text("import torch\n")
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["ddpdiag", *shlex.split(words.format(**paths))])
    with open(writer, "w") as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == ExitCode.CLOSED_PIPE
    assert not re.search("Broken pipe|Traceback", capsys.readouterr().err)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The JSON report of a run that hangs."""
    path = tmp_path / "report.json"
    report = judge(read_recording([HEALTHY.with_name("hang-4-ranks.jsonl")]), all_checks())
    path.write_bytes(encode(report))
    return path


@pytest.mark.parametrize("layout", [encode, indented_json])
def test_a_report_is_shown_again_as_its_recording_would_be(written: Path, capsys, golden, layout) -> None:
    report = read_report(str(written))
    text = layout(report)
    written.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert judge_command.run([str(HEALTHY.with_name("hang-4-ranks.jsonl"))], Outputs()) == ExitCode.UNFIT
    of_recording = capsys.readouterr().out
    assert judge_command.run([str(written)], Outputs(prometheus=str(written.with_name("metrics")))) == ExitCode.UNFIT
    assert "ddpdiag_" in written.with_name("metrics").read_text()
    shown = capsys.readouterr()
    assert shown.out == of_recording
    golden(shown.err.replace(str(written), "report.json"))


def test_a_report_cannot_be_judged_again(written: Path, golden) -> None:
    record = str(written.with_name("run.jsonl"))
    for asked in (Outputs(strict=True), Outputs(record=record), Outputs(write_workaround=record)):
        with pytest.raises(UsageError) as caught:
            judge_command.run([str(written)], asked)
        golden(str(caught.value).replace(str(written), "report.json"))
