"""Files that once ended in a traceback, took minutes, or filled the memory. Large ones are made here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from readers import HEALTHY, report_of

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli import judge
from ddpdiag.cli.outputs import Outputs
from ddpdiag.codec import read_recording
from ddpdiag.compare import command as compare
from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.judgement import judge as judged
from ddpdiag.lint import command as lint_command
from ddpdiag.model import Verdict

CORPUS = Path(__file__).parent / "corpus"
Line = dict[str, object]


def recording(path: Path, change: Callable[[list[Line]], object]) -> Path:
    """The healthy recording of two ranks, changed."""
    lines = [json.loads(line) for line in HEALTHY.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def is_of_rank_1(line: Line) -> bool:
    place = line.get("place", {})
    return line.get("rank") == 1 or (isinstance(place, dict) and place.get("rank") == 1)


def test_one_script_in_another_encoding_does_not_end_the_run(golden) -> None:
    other = Path(__file__).parent.parent / "unit" / "scripts" / "torchrun_script.py"
    report = lint_command.judge_files([str(CORPUS / "latin-1.txt"), str(other)])
    assert (report.exit_code, len(report.scripts)) == (ExitCode.USAGE, 1)
    golden(*(error.replace(str(CORPUS), "CORPUS") for error in report.errors))


def test_more_ranks_than_there_can_be_are_refused(golden, tmp_path: Path) -> None:
    path = recording(tmp_path / "world", lambda lines: lines[0].update(world_size=200_000_000))
    with pytest.raises(UsageError) as caught:
        judge.run([str(path)], Outputs())
    golden(str(caught.value).replace(str(tmp_path), "TMP"))


def test_data_that_is_nested_deep_is_not_judged(golden, tmp_path: Path) -> None:
    path = recording(tmp_path / "deep", lambda lines: lines[4].update(data="@"))
    path.write_text(path.read_text().replace('"@"', "[" * 100_000 + "]" * 100_000))
    report = judged(read_recording([path]), all_checks())
    assert report.verdict is Verdict.UNKNOWN
    golden(report.recording_problems[0])


def test_figures_that_no_machine_has_are_not_judged(tmp_path: Path) -> None:
    def enlarge(lines: list[Line]) -> None:
        data = next(line["data"] for line in lines if line.get("code") == "COL001" and line["type"] == "outcome")
        assert isinstance(data, dict)
        data["large_seconds"] = dict.fromkeys(("min", "median", "p95"), 1e308) | {"count": 3}

    report = judged(read_recording([recording(tmp_path / "huge", enlarge)]), all_checks())
    assert report.verdict is Verdict.UNKNOWN
    assert any(note.startswith("COL001 was not judged") for note in report.recording_problems)


def test_a_report_with_such_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(json.loads(report_of(HEALTHY)) | {"seconds": 1e308}))
    with pytest.raises(UsageError):
        compare.run(str(path), str(HEALTHY))


@pytest.mark.parametrize("said", ["", "\x1b[2J", "many ranks", "9" * 5000])
def test_a_report_whose_number_of_ranks_is_none_is_compared(tmp_path: Path, said: str) -> None:
    report = json.loads(report_of(HEALTHY))
    report["snapshot"]["shape"]["ranks"] = said
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert compare.run(str(HEALTHY), str(path)) == compare.run(str(HEALTHY), str(HEALTHY))


def test_a_rank_that_came_very_often_is_one_finding(golden, tmp_path: Path) -> None:
    def repeat(lines: list[Line]) -> None:
        event = {"type": "event", "kind": "duplicate", "rank": 1, "detail": "n0"}
        lines[3:3] = [event | {"seconds": at / 1000, "host": f"n{at}"} for at in range(100_000)]

    report = judged(read_recording([recording(tmp_path / "often", repeat)]), all_checks())
    (finding,) = [each for each in report.findings if each.code == "LCH001.duplicate"]
    golden(finding)


@pytest.mark.parametrize("kept", ["place", "all but one outcome"])
def test_a_rank_without_lines_is_unknown(golden, tmp_path: Path, kept: str) -> None:
    def drop(lines: list[Line]) -> None:
        gone = [line for line in lines if is_of_rank_1(line)]
        for line in gone[-1:] if kept != "place" else gone:
            lines.remove(line)

    report = judged(read_recording([recording(tmp_path / "less", drop)]), all_checks())
    assert (report.verdict, report.exit_code) == (Verdict.UNKNOWN, ExitCode.UNKNOWN)
    golden(report.sentence)


def test_a_script_that_takes_too_long_is_refused(golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_command, "_TIME_LIMIT_SECONDS", 0.001)  # of processor time, whatever else runs
    path = tmp_path / "entangled.py"
    exits = "".join(f"    if rank == {at}: return\n    dist.barrier()\n" for at in range(2000))
    path.write_text(f"import torch.distributed as dist\ndist.init_process_group()\ndef f(rank):\n{exits}")
    report = lint_command.judge_files([str(path)])
    assert report.exit_code == ExitCode.USAGE
    golden(*(error.replace(str(tmp_path), "TMP") for error in report.errors))


def test_a_script_that_is_too_large_is_refused(golden, tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text("import torch.distributed as dist\ndist.init_process_group()\n" + "x = 1\n" * 500_000)
    report = lint_command.judge_files([str(path)])
    assert report.exit_code == ExitCode.USAGE
    golden(*(error.replace(str(tmp_path), "TMP") for error in report.errors))
