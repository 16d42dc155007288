"""`ddpdiag lint` as it is typed: exit codes, directories, comments, JSON, and files that are no Python."""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ddpdiag.cli.app import app
from ddpdiag.cli.outputs import LintArgs
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.lint.command import LintReport, judge_files, read_findings, report_text, run, select_rules
from ddpdiag.lint.rules import all_rules

SCRIPTS = Path(__file__).parent / "scripts"
CLEAN = SCRIPTS / "torchrun_script.py"
EPOCH = "        sampler.set_epoch(epoch)\n"
SAMPLER = "    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)"


@pytest.fixture
def faulty(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CLEAN.read_text().replace(EPOCH, ""))
    return path


def text(report: LintReport, **options) -> str:
    return report_text(report, **({"details": False, "width": 80, "color": False} | options))


def test_nothing_found_is_zero(capsys, golden):
    assert run([str(CLEAN)], LintArgs(details=False)) == ExitCode.FIT
    golden(capsys.readouterr().out)


def test_a_remark_has_its_place_its_code_and_a_way_out(faulty, capsys, golden):
    assert run([str(faulty)], LintArgs(details=False)) == ExitCode.UNFIT
    out = capsys.readouterr().out
    assert out.startswith(f"{faulty}:81:15: warning LNT010 no-set-epoch\n")
    golden(out.replace(str(faulty), "train.py"))


def test_hints_do_not_count(tmp_path, capsys, golden):
    path = tmp_path / "train.py"
    path.write_text(CLEAN.read_text().replace("    dist.destroy_process_group()\n", ""))
    assert run([str(path)], LintArgs(details=False)) == ExitCode.FIT
    golden(capsys.readouterr().out)
    assert run([str(path)], LintArgs(details=True)) == ExitCode.FIT
    golden(capsys.readouterr().out.replace(str(path), "train.py"))


@pytest.mark.parametrize(
    "comment", ["# ddpdiag: ignore[LNT010]", "# ddpdiag:ignore[lnt001, lnt010]", "# ddpdiag: ignore"]
)
def test_a_comment_keeps_a_remark_quiet(golden, faulty, comment):
    faulty.write_text(faulty.read_text().replace(SAMPLER, f"{SAMPLER}  {comment}"))
    report = judge_files([str(faulty)])
    assert (report.findings, report.exit_code) == ((), ExitCode.FIT)
    golden(text(report))


@pytest.mark.parametrize("comment", ["# ddpdiag: ignore[LNT001]", "; '# ddpdiag: ignore[LNT010]'"])
def test_a_comment_for_another_rule_and_a_string_do_not(faulty, comment):
    faulty.write_text(faulty.read_text().replace(SAMPLER, f"{SAMPLER}  {comment}"))
    assert [finding.code for finding in judge_files([str(faulty)]).findings] == ["LNT010"]


def test_a_directory_is_walked(faulty, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "other.py").write_text(faulty.read_text())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "hidden.py").write_text(faulty.read_text())
    (tmp_path / "notes.txt").write_text("no Python")
    report = judge_files([str(tmp_path), str(faulty)])
    assert [Path(script.path).name for script in report.scripts] == ["train.py", "other.py"]


def test_an_encoding_that_is_declared_is_read(tmp_path, faulty):
    path = tmp_path / "latin.py"
    path.write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + faulty.read_bytes())
    (moved,), (found,) = (judge_files([str(script)]).findings for script in (path, faulty))
    assert moved.evidence["line"] - 2 == found.evidence["line"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"x = (\n", ":1: "),
        (b"x = 1\nprint 'x'\n", ":2: "),
        (b"\x00", ":"),
        (b"x = 1\n# caf\xe9\n", ":2: "),
        (b"(" * 5000 + b")" * 5000, ":"),
        (b"import torch.distributed as d\nd.init_process_group()\nif " + b"not " * 900 + b"x: d.barrier()\n", ": "),
        (b"#" * ((512 << 10) + 1), ": "),
    ],
    ids=["open", "Python 2", "null byte", "no UTF-8", "parentheses", "deep", "large"],
)
def test_what_is_no_python_is_named_and_the_rest_is_judged(golden, tmp_path, faulty, content, place, capsys):
    bad = tmp_path / "bad" / "train.py"
    bad.parent.mkdir()
    bad.write_bytes(content)
    assert run([str(bad), str(faulty)], LintArgs(details=False)) == ExitCode.USAGE
    streams = capsys.readouterr()
    assert streams.err.startswith(f"ddpdiag: {bad}{place}")
    assert "LNT010" in streams.out
    # What Python says of it follows, and differs between its versions.
    golden(streams.err.split(": ")[2])


def test_json_goes_to_standard_output_and_the_text_to_standard_error(faulty, capsys):
    assert run([str(faulty)], LintArgs(json="-", details=False)) == ExitCode.UNFIT
    streams = capsys.readouterr()
    report = json.loads(streams.out)
    assert (report["schema"], report["exit_code"]) == ("ddpdiag.lint/1", 1)
    (found,) = report["findings"]
    assert (found["code"], found["severity"], found["evidence"]["line"]) == ("LNT010", "warning", 81)
    assert "LNT010" in streams.err


def test_a_script_is_not_overwritten(faulty, golden):
    script = faulty.read_text()
    with pytest.raises(UsageError) as caught:
        run([str(faulty)], LintArgs(json=str(faulty), details=False))
    assert faulty.read_text() == script
    golden(str(caught.value).replace(str(faulty), "train.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nmodel = torch.nn.Linear(1, 1)\n",
        "from accelerate import Accelerator\nimport torch.distributed as d\nd.init_process_group()\n",
    ],
    ids=["no training", "accelerate"],
)
def test_what_is_none_of_ours_is_not_called_clean(golden, tmp_path, source):
    path = tmp_path / "other.py"
    path.write_text(source)
    report = judge_files([str(path)])
    assert report.scripts[0].not_judged
    golden(text(report).replace(str(path), "other.py"))


def test_every_rule_has_a_page_with_fix_and_source():
    for rule in all_rules():
        assert all(word in rule.manual for word in ("What:", "Why:", "Fix:", "Source: https://"))
        assert len(rule.title) < 80
        assert rule.manual.isascii()
    assert len({rule.name for rule in all_rules()} | {rule.code for rule in all_rules()}) == 2 * len(all_rules())


@pytest.mark.parametrize(
    "source",
    [
        "a = b\nb = a\nif a == 0:\n    d.barrier()\n",
        "def f(x):\n    return f(x)\nrank = f(1)\n",
        "def f():\n    g()\ndef g():\n    f()\n    torch.save(1, 'x')\n",
        "class A(A): pass\nself.x = self.x\n",
        "x = " + " + ".join("rank" for _ in range(900)) + "\n",
        "lambda: (yield)\n[a for a in a for a in a]\nfor x in x: x\n",
    ],
)
def test_loops_in_a_script_end(source):
    head = "import torch\nimport torch.distributed as d\nd.init_process_group()\n"
    read_findings((head + source).encode(), "script.py")


@pytest.mark.parametrize(
    ("select", "ignore", "found"),
    [((), (), {"LNT010"}), (("lnt01",), (), {"LNT010"}), (("LNT001,LNT002",), (), set()), ((), ("LNT010",), set())],
)
def test_rules_are_chosen_by_code_or_prefix(faulty, select, ignore, found):
    assert {finding.code for finding in judge_files([str(faulty)], select_rules(select, ignore)).findings} == found


@pytest.mark.parametrize("option", ["select", "ignore"])
def test_an_unknown_code_is_refused_with_the_nearest(faulty, option):
    with pytest.raises(UsageError, match=f"--{option} LNT01O: unknown code of a lint rule; expected LNT001 to"):
        run([str(faulty)], LintArgs(details=False, **{option: ("LNT01O",)}))


def test_the_hook_of_pre_commit_reads_the_files_that_it_is_given(faulty):
    config = yaml.safe_load((Path(__file__).parents[2] / "recipes/pre-commit-config.yaml").read_text())
    (hook,) = config["repos"][0]["hooks"]
    program, *words = hook["entry"].split()
    assert program == "ddpdiag"
    done = CliRunner().invoke(app, [*words, str(CLEAN), str(faulty)])
    assert (done.exit_code, "LNT010" in done.output) == (ExitCode.UNFIT, True)


HELPER = """\
import torch.distributed as dist


def save(rank):
\tname = "日本"; dist.barrier()


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    save(0)  # on rank 0
dist.destroy_process_group()
"""


@pytest.fixture
def helped(tmp_path):
    """A script with a barrier in a function that only rank 0 calls."""
    path = tmp_path / "train.py"
    path.write_text(HELPER, encoding="utf-8")
    return path


def test_a_finding_is_at_the_call_in_the_branch_and_its_helper_is_a_note(helped, golden):
    report = judge_files([str(helped)])
    (finding,) = report.findings
    found = finding.evidence
    # Columns are characters, where Python counts bytes.
    assert (finding.code, found["line"], found["column"]) == ("LNT018", 10, 5)
    assert (found["helper_line"], found["helper_column"]) == (5, 15)
    golden(text(report).replace(str(helped), "train.py"))


@pytest.mark.parametrize("line", ["    save(0)", '\tname = "日本"; dist.barrier()'])
def test_a_comment_at_the_call_or_in_the_helper_keeps_both_quiet(helped, line):
    helped.write_text(HELPER.replace(line, f"{line}  # ddpdiag: ignore[LNT018] "), encoding="utf-8")
    assert judge_files([str(helped)]).findings == ()


def test_a_script_is_read_from_a_pipe(helped, monkeypatch, capsys):
    for data, code in ((HELPER.encode(), ExitCode.UNFIT), (b"x" * (513 << 10), ExitCode.USAGE)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert run(["-"], LintArgs(details=False)) == code
    said = capsys.readouterr()
    assert said.out.startswith("-:10:5: error LNT018")
    assert said.err == "ddpdiag: -: cannot be read: it has more than 512 KiB, the most that is read\n"
