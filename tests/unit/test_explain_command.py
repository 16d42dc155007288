"""`ddpdiag explain`, as it is typed: codes, names, texts, logs, pipes."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.manual import Page, as_markdown
from ddpdiag.cli.outputs import ExplainOptions
from ddpdiag.errors import UsageError
from ddpdiag.explain import command
from ddpdiag.explain.command import run

LOG = Path(__file__).parent.parent / "recordings" / "logs" / "rank_raises.log"


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    return run(["-"])


def test_a_name_is_as_good_as_a_code(capsys) -> None:
    assert run(["pcie-link"]) == 0
    by_name = capsys.readouterr().out
    assert run(["gpu004"]) == 0
    assert capsys.readouterr().out == by_name


@pytest.mark.parametrize("code", [*(check.code for check in all_checks()), "P2P003.fallback", "lnt001"])
def test_every_code_has_its_page(code: str, capsys) -> None:
    assert run([code]) == 0
    assert capsys.readouterr().out.startswith(code.upper()[:6])


def test_a_text_is_explained_and_its_page_follows(capsys, golden) -> None:
    assert run(["NCCL WARN Duplicate GPU"]) == 0
    explained, page, _ = capsys.readouterr().out.partition("GPU002 torch-view")
    assert page
    golden(explained)


def test_quotes_may_be_forgotten(capsys) -> None:
    assert run(["address", "already", "in", "use"]) == 0
    assert "RDZ005.taken" in capsys.readouterr().out


def test_a_text_that_nobody_knows_is_no_error_of_usage(capsys, golden) -> None:
    assert run(["my cat is ill"]) == 3
    golden(capsys.readouterr().out)


@pytest.mark.parametrize("word", ["COL999", "LNT999", "GPU004.wide", "nonsense", ""])
def test_a_word_that_nobody_knows_is_refused(word: str) -> None:
    with pytest.raises(UsageError):
        run([word])


@pytest.mark.parametrize("name", ["slurm-4711.out", "logs/rank0", "train.log"])
def test_a_file_that_is_not_there_is_said_to_be_missing(golden, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        run([name])
    golden(str(caught.value))


def test_a_log_is_read_from_a_pipe_and_from_a_file_alike(capsys, monkeypatch) -> None:
    assert piped(monkeypatch, LOG.read_bytes()) == 0
    out = capsys.readouterr().out
    monkeypatch.chdir(LOG.parent)
    assert run([LOG.name]) == 0
    # The name of the log stands before.
    assert capsys.readouterr().out.split(": ", 2)[2] == out.split(": ", 2)[2]


def test_an_empty_log_explains_nothing(capsys, monkeypatch, golden) -> None:
    assert piped(monkeypatch, b"") == 3
    golden(capsys.readouterr().out)


def test_a_closed_standard_input_is_refused(golden, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError) as caught:
        run(["-"])
    golden(str(caught.value))


@pytest.fixture
def logs(tmp_path: Path, monkeypatch) -> None:
    """A log with a failure, and one without."""
    (tmp_path / "rank0.log").write_text("[rank0]: ValueError: batch of 3 images, 100% wrong\n")
    (tmp_path / "rank1.log").write_text("step 1\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("logs")
def test_several_logs_are_shown_each_under_its_name_and_the_worst_code_counts(capsys) -> None:
    assert run(["rank0.log", "rank0.log"]) == 0
    assert run(["rank0.log", "rank1.log"]) == 3
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ddpdiag: ")]
    assert [head.split(":")[1].strip() for head in heads] == ["rank0.log", "rank0.log", "rank0.log", "rank1.log"]


@pytest.mark.usefixtures("logs")
def test_the_text_files_of_a_folder_are_read(tmp_path, capsys, golden) -> None:
    run_folder = tmp_path / "logs" / "none_x1" / "attempt_0"  # as torchrun --log-dir makes it
    for rank in ("0", "1"):
        (run_folder / rank).mkdir(parents=True)
        (run_folder / rank / "stdout.log").write_text("step 1\n")
        (run_folder / rank / "stderr.log").touch()
    (run_folder / "1" / "stderr.log").write_text("[rank1]: ValueError: batch of 3 images\n")
    os.mkfifo(run_folder / "a.fifo")
    (run_folder / "core").write_bytes(b"\x7fELF\0")
    (run_folder / "0" / "deeper").mkdir()
    (run_folder / "0" / "deeper" / "a.log").write_text("NCCL WARN Duplicate GPU detected\n")
    assert run(["logs"]) == 0
    golden(capsys.readouterr().out)
    assert run(["logs/none_x1/attempt_0/0/stdout.log", "logs"], ExplainOptions(json="-")) == 0
    read = [
        Path(each["path"]).relative_to("logs/none_x1/attempt_0")
        for each in json.loads(capsys.readouterr().out)["files"]
    ]
    assert [*map(str, read)] == ["0/stdout.log", "0/stdout.log", "1/stderr.log", "1/stdout.log"]
    assert run(["logs/none_x1/attempt_0/0"]) == 0
    assert "GPU002" in capsys.readouterr().out


@pytest.mark.usefixtures("logs")
def test_a_folder_without_a_known_text_and_one_without_text(tmp_path, capsys, golden) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "calm" / "out").write_text("step 1\n")
    assert run(["calm"]) == 3
    (tmp_path / "calm" / "out").write_bytes(b"\0")
    with pytest.raises(UsageError) as caught:
        run(["calm"])
    golden(capsys.readouterr().out, str(caught.value))


def test_a_folder_of_too_many_files_is_read_in_part(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "_MOST_FILES", 2)
    for name in "abc":
        (tmp_path / name).write_text("step 1\n")
    assert run([str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert "no known text in 2 files" in said.out
    assert "has more than 2 text files" in said.err


@pytest.mark.usefixtures("logs")
def test_a_missing_log_among_others_is_named_and_words_are_one_text(capsys) -> None:
    with pytest.raises(UsageError, match=r"rank7\.log: no such file"):
        run(["rank0.log", "rank7.log"])
    assert run(["rank0.log", "failed:", "address", "already", "in", "use"]) == 0
    assert not capsys.readouterr().out.startswith("ddpdiag: rank0.log")


@pytest.mark.usefixtures("logs")
def test_json_has_every_file_with_its_sightings(capsys) -> None:
    assert run(["rank0.log", "rank1.log"], ExplainOptions(json="-")) == 3
    printed = capsys.readouterr()
    assert "No known error found" in printed.err
    report = json.loads(printed.out)
    assert (report["schema"], report["exit_code"]) == ("ddpdiag.explain/1", 3)
    first, second = report["files"]
    assert (second["path"], second["is_explained"], second["sightings"]) == ("rank1.log", False, [])
    (row,) = first["sightings"]
    expected = {"role": "failure", "card": "exception", "is_known": False, "code": "RUN003.raised", "line": 1}
    assert {key: row[key] for key in expected} == expected
    assert (row["ranks"], row["excerpt"]) == ([0], "ValueError: batch of 3 images, 100% wrong")
    documented = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    keys = [*report, *first, *row]
    assert [key for key in keys if f"`{key}`" not in documented] == []


@pytest.mark.usefixtures("logs")
def test_json_of_an_error_text_has_no_path_and_no_page(capsys) -> None:
    assert run(["NCCL WARN Duplicate GPU"], ExplainOptions(json="out.json")) == 0
    (file,) = json.loads(Path("out.json").read_text())["files"]
    assert (file["path"], file["sightings"][0]["card"]) == ("", "duplicate-gpu")
    assert "GPU002 torch-view" not in capsys.readouterr().out


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["COL001"], ExplainOptions(json="-")),
        (["rank0.log"], ExplainOptions(json="rank0.log")),
        (["rank0.log"], ExplainOptions(json="no/such/folder.json")),
    ],
    ids=["page-json", "own-log", "no-folder"],
)
def test_outputs_that_cannot_be_are_refused(golden, words: list[str], how: ExplainOptions) -> None:
    with pytest.raises(UsageError) as caught:
        run(words, how)
    golden(str(caught.value))
    assert Path("rank0.log").read_text().startswith("[rank0]")


def test_the_whole_manual_is_one_document() -> None:
    page = Page(
        "ABC001", "name", "gpu", "Title.\n\nText with `code_x <y>` and a_b <script>.\n\n- item: one.", {"limit": 2.0}
    )
    text = as_markdown([page], "1.0")
    assert "[ABC001](#abc001)" in text
    assert "`code_x <y>` and a\\_b \\<script\\>" in text
    assert "`ABC001.limit=2`" in text
