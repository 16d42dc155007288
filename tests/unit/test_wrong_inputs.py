"""Whatever is typed wrongly is told in one sentence that names it, before anything is measured, read or written."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpdiag.cli import watch
from ddpdiag.cli.app import app
from ddpdiag.cli.outputs import Outputs
from ddpdiag.errors import UsageError


def refused(*words: str) -> str:
    """The sentence; commands raise it, and the edge makes it an exit code."""
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UsageError), error
    assert error.exit_code == 2
    return str(error)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("check", "--topology", ""), "--topology"),
        (("check", "--exclude-file", ""), "--exclude-file"),
        (("check", "--set", ""), "--set"),
        (("check", "--master_addr", ""), "--master-addr"),
        (("allreduce-bench", "-b", ""), "--minbytes"),
        (("allreduce-bench", "-J", ""), "--json"),
        (("train", "--data-dir", ""), "--data-dir"),
        (("host", "--record", ""), "--record"),
        (("watch", "--bundle", "", "--", "true"), "--bundle"),
        (("judge", ""), "FILE"),
        (("compare", "a", ""), "NEW"),
        (("lint", ""), "FILE"),
        (("manual", "--markdown", ""), "--markdown"),
    ],
)
def test_an_empty_name_is_told_by_its_option(words: tuple[str, ...], name: str) -> None:
    assert refused(*words) == f"{name}: it is empty; is a variable not set?"


@pytest.mark.parametrize("name", ["slower", "noise", "transients", "congestion"])
def test_a_share_that_is_no_number_is_refused(name: str) -> None:
    assert refused("simulate", f"--{name}", "nan") == f"--{name} nan: expected a share, such as 0.02"


def test_many_simulated_runs_make_no_report() -> None:
    assert "give no option of the output" in refused("simulate", "--trials", "2", "--hosts", "2", "--json", "x")


def test_an_empty_command_cannot_be_watched() -> None:
    with pytest.raises(UsageError, match="the command to watch is empty"):
        watch.run([""], stall=300, kill=False, output=(), bundle=None, flight_recorder=False, alone=False)
    with pytest.raises(UsageError, match="--read: the name of a file is empty"):
        watch.read([""])


def test_one_file_under_two_names_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Outputs(json="a", markdown="./b").check()
    for other in ("./a", "../" + tmp_path.name + "/a", str(tmp_path / "a")):
        with pytest.raises(UsageError, match="--json and --markdown both name"):
            Outputs(json="a", markdown=other).check()


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "base").touch()
    with pytest.raises(UsageError, match=r"--record .* would overwrite a file that is read"):
        Outputs(record=str(tmp_path / "base")).check([str(tmp_path / "base")])


def test_a_plug_in_has_one_line_on_standard_output() -> None:
    Outputs(nagios=True, json="x").check()
    with pytest.raises(UsageError, match="--json -: with --nagios"):
        Outputs(nagios=True, json="-").check()
