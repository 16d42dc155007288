"""`ddpdiag explain`, as it is typed: codes, names, texts, logs, pipes."""

import io
import os
import sys
from pathlib import Path

import pytest

from ddpdiag.checks.registry import all_checks
from ddpdiag.cli.manual import Page, as_markdown
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


def test_an_unknown_text_is_no_error_of_usage(capsys, golden) -> None:
    assert run(["my cat is ill"]) == 3
    golden(capsys.readouterr().out)


@pytest.mark.parametrize("word", ["COL999", "LNT999", "GPU004.wide"])
def test_a_code_that_does_not_exist_is_refused(word: str) -> None:
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
def test_several_logs_are_one_job_and_those_without_a_known_text_are_named(capsys, golden) -> None:
    assert run(["rank1.log", "rank0.log", "rank0.log"]) == 0  # the same log is read once
    golden(capsys.readouterr().out)
    assert run(["rank1.log", "rank1.log"]) == 3
    golden(capsys.readouterr().out)


@pytest.mark.usefixtures("logs")
def test_a_folder_is_its_text_files(tmp_path, capsys, monkeypatch, golden) -> None:
    run_folder = tmp_path / "logs" / "none_x1" / "attempt_0"  # as torchrun --log-dir makes it
    for rank in ("0", "1"):
        (run_folder / rank).mkdir(parents=True)
        (run_folder / rank / "stdout.log").write_text("step 1\n")
        (run_folder / rank / "stderr.log").touch()
    (run_folder / "1" / "stderr.log").write_text("[rank1]: ValueError: batch of 3 images\n")
    (run_folder / "core").write_bytes(b"\x7fELF\0")
    os.mkfifo(run_folder / "a.fifo")
    (run_folder / "link.log").symlink_to(tmp_path / "rank0.log")
    (run_folder / "loop").symlink_to(tmp_path / "logs")
    assert run(["logs"]) == 0
    golden(capsys.readouterr().out)
    monkeypatch.setattr(command, "_MAX_FILES", 2)  # a core dump and an empty file
    with pytest.raises(UsageError, match="logs: no text file and no flight-recorder dump in this folder"):
        run(["rank0.log", "logs"])
    assert capsys.readouterr().err == "ddpdiag: logs has more than 2 files; the others are not read\n"


@pytest.mark.usefixtures("logs")
def test_a_missing_log_among_others_is_named_and_words_are_one_text(capsys) -> None:
    with pytest.raises(UsageError, match=r"rank7\.log: no such file"):
        run(["rank0.log", "rank7.log"])
    assert run(["rank0.log", "failed:", "address", "already", "in", "use"]) == 0
    assert not capsys.readouterr().out.startswith("ddpdiag: rank0.log")


def test_the_whole_manual_is_one_document() -> None:
    page = Page(
        "ABC001", "name", "gpu", "Title.\n\nText with `code_x <y>` and a_b <script>.\n\n- item: one.", {"limit": 2.0}
    )
    text = as_markdown([page], "1.0")
    assert "[ABC001](#abc001)" in text
    assert "`code_x <y>` and a\\_b \\<script\\>" in text
    assert "`ABC001.limit=2`" in text
