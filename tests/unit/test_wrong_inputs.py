"""Whatever is typed wrongly is told in one sentence that names it, before anything is measured, read or written."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpdiag.cli.app import app
from ddpdiag.cli.outputs import Outputs
from ddpdiag.errors import UsageError
from ddpdiag.watch import WatchArgs
from ddpdiag.watch import command as watch


def refused(*words: str) -> str:
    """The sentence; commands raise it, and the edge makes it an exit code."""
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UsageError), error
    assert error.exit_code == 2
    return str(error)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("check --topology ''", "--topology"),
        ("check --write-failing-hosts ''", "--write-failing-hosts"),
        ("check --set ''", "--set"),
        ("check --master_addr ''", "--master-addr"),
        ("allreduce-bench -b ''", "--minbytes"),
        ("allreduce-bench -J ''", "--json"),
        ("check --shared-dir ''", "--shared-dir"),
        ("host --record ''", "--record"),
        ("watch --output '' -- true", "--output"),
        ("judge ''", "FILE"),
        ("compare a ''", "NEW"),
        ("lint ''", "FILE"),
    ],
)
def test_an_empty_name_is_told_by_its_option(words: str, name: str) -> None:
    assert refused(*shlex.split(words)) == f"{name}: the value is empty; is a variable not set?"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--set NOSUCH.x=1", "NOSUCH"),
        ("--json .", "."),
        ("--record nosuch/run.jsonl", "nosuch"),
        ("--shared-dir gone", "gone"),
    ],
)
def test_what_cannot_be_done_is_refused_before_ranks_start(monkeypatch, tmp_path, options, word) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddpdiag.cli.check.start_ranks", None)
    monkeypatch.setattr("ddpdiag.cli.app.guarded", lambda body: body())
    assert word in refused("check", "--nproc-per-node", "2", *shlex.split(options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["slower", "noise", "transients", "congestion"])
def test_a_share_that_is_no_number_is_refused(golden, name: str) -> None:
    golden(refused("simulate", f"--{name}", "nan"))


def test_an_empty_command_cannot_be_watched(golden) -> None:
    with pytest.raises(UsageError) as command:
        watch.run([""], WatchArgs())
    golden(str(command.value))


def test_one_file_under_two_names_is_told(golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Outputs(json="a", markdown="./b").check()
    for other in ("./a", "../" + tmp_path.name + "/a", str(tmp_path / "a")):
        with pytest.raises(UsageError) as caught:
            Outputs(json="a", markdown=other).check()
        golden(str(caught.value).replace(other, "OTHER"))


def test_what_is_read_is_not_overwritten(golden, tmp_path: Path) -> None:
    (tmp_path / "base").touch()
    with pytest.raises(UsageError) as caught:
        Outputs(record=str(tmp_path / "base")).check([str(tmp_path / "base")])
    golden(str(caught.value).replace(str(tmp_path), "TMP"))
