"""Options by their former names, as variables of the environment, as FORMAT=FILE; usage errors as one sentence."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from forked import Forked
from typer.testing import CliRunner

from ddpdiag.bench.options import BenchOutputs
from ddpdiag.cli import check
from ddpdiag.cli.app import app
from ddpdiag.cli.check import check_backend, why_no_nccl
from ddpdiag.cli.edge import with_variable
from ddpdiag.cli.options import CheckArgs, HostArgs, variable_of
from ddpdiag.cli.outputs import Outputs
from ddpdiag.cli.parsing import unknown_variables
from ddpdiag.errors import UsageError
from ddpdiag.model.bench import BenchRequest
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.model.train import TrainRequest
from ddpdiag.runtime.launchers.launch import ThisHost, requested_rank_count
from ddpdiag.watch import WatchArgs

KINDS = (LaunchArgs, CheckArgs, HostArgs, Outputs, BenchRequest, BenchOutputs, TrainRequest, WatchArgs)
VARIABLES = {variable_of(each) for kind in KINDS for each in fields(kind)} - {None}
# What the product, the recipes and the tests read besides.
RESERVED = {
    name
    for folder in ("ddpdiag", "recipes", "tests/inject")
    for path in (Path(__file__).parents[2] / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".yaml", ".sbatch", ".conf") and path.is_file()
    for name in re.findall(r"\bDDPDIAG_[A-Z_]+\b", path.read_text())
} - {"DDPDIAG_BUDGET"}


@pytest.fixture
def parsed(monkeypatch):
    """What `ddpdiag check` was asked for."""
    calls = []
    monkeypatch.setattr(check, "run", lambda launch, what, outputs: calls.append((launch, what, outputs)) or 0)
    monkeypatch.setattr("ddpdiag.cli.app.exit_at_once", lambda code: None)

    def parse(words="", **environment):
        done = CliRunner().invoke(app, ["check", *shlex.split(words)], env=environment)
        if done.exception is not None:
            raise done.exception
        return calls[-1]

    return parse


def test_a_variable_is_an_option_and_the_command_line_wins(parsed):
    _, what, _ = parsed(DDPDIAG_BUDGET="30", DDPDIAG_STAGE="launch,host")
    assert (what.budget, what.stage) == (30.0, ("launch", "host"))
    _, what, _ = parsed("--budget 20", DDPDIAG_BUDGET="30")
    assert what.budget == 20.0


def test_ranks_files_and_secrets_are_no_variables():
    assert not VARIABLES & {
        f"DDPDIAG_{name}" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "JSON", "RECORD", "TOKEN")
    }


def test_no_option_takes_the_name_of_another_variable():
    assert set() == VARIABLES & RESERVED


def ranks_of(text: str | None, gpus: int) -> int | None:
    parse = LaunchArgs.__dataclass_fields__["nproc_per_node"].metadata["parse"]
    here = ThisHost(name="n0", gpus=gpus, cores=6, unique_id="x")
    return requested_rank_count(LaunchArgs(nproc_per_node=text and parse(text)), here)


@pytest.mark.parametrize(
    ("text", "gpus", "ranks"), [(None, 8, None), ("4", 8, 4), ("gpu", 8, 8), ("auto", 8, 8), ("cpu", 8, 6)]
)
def test_ranks_of_a_host_are_named_as_by_torchrun(text, gpus, ranks):
    assert ranks_of(text, gpus) == ranks


@pytest.mark.parametrize("text", ["gpu", "x", "-1", "1.5", "\u00b2"])
def test_ranks_that_there_cannot_be_are_refused(text):
    with pytest.raises(UsageError):
        ranks_of(text, 0)


@pytest.mark.parametrize("name", ["NCCL", " gloo ", "cpu:gloo,cuda:nccl", "standin"])
def test_a_backend_that_torch_or_a_package_declares_is_taken(name):
    check_backend(name)


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0", None])
def test_nccl_without_a_gpu_has_a_fix(golden, monkeypatch, version):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("ddpdiag.cli.check.torch_version", lambda: version)
    assert why_no_nccl("gloo") is None
    golden(why_no_nccl(" NCCL "))


# Each is one line on standard error, and nothing else.
MISTAKES = (
    *("chek", "--bogus", "check --bogus", "check --budgt 3", "check --budget", "check --budget x", "check extra"),
    *("check --nprocs 2", "check -np 2", "train --num_gpus=2", "host --gpus 2", "check --timeout 30"),
    *("check --stage gpus", "check --select FOO001", "check --backend ncll", "check --nproc-per-node many", "explain"),
    *("bench -g 8", "bench --datatype float8", "compare one.jsonl", "simulate --hosts 1", "train --strategy dpp"),
    *("check --budget -5", "check --color sometimes", "check --depth quik", "check --strict=3"),
    *("judge gone.jsonl", "watch --stall -1 -- true", "bench -f 2 -i 8", "check --json /nowhere/report.json"),
    *("DDPDIAG_BUDGET=x check", "DDPDIAG_STAGE=gpus check", "DDPDIAG_STRICT=x check", "lint --select LNT026 x.py"),
    *("explain TRN001.divergd", "simulate --fault slow-hst", "check --select COL01"),
)


MAIN = "from ddpdiag.cli import main; main()"


@pytest.fixture(scope="module")
def ddpdiag() -> Iterator[Forked]:
    with Forked("import ddpdiag.cli.app, ddpdiag.cli.check, ddpdiag.cli.judge") as forked:
        yield forked


def test_wrong_usage_is_one_sentence(golden, ddpdiag):
    lines = []
    for words in MISTAKES:
        given = [word for word in shlex.split(words) if word.startswith("DDPDIAG_")]
        done = ddpdiag.run(MAIN, *shlex.split(words)[len(given) :], **dict(word.split("=") for word in given))
        assert (done.returncode, done.stdout) == (2, ""), words
        lines.append(f"$ {shlex.join([*given, 'ddpdiag', *shlex.split(words)[len(given) :]])}\n{done.stderr.rstrip()}")
        assert done.stderr.count("\n") == 1, words
    golden("\n".join(lines))


def test_a_variable_is_named_where_its_value_is_wrong():
    sentence = "--stage gpus: unknown stage"
    assert with_variable(sentence, ["check"], {"DDPDIAG_STAGE": "gpus"}) == f"DDPDIAG_STAGE: {sentence}"
    assert with_variable(sentence, ["check", "--stage=gpus"], {"DDPDIAG_STAGE": "host"}) == sentence
    assert with_variable(sentence, ["check"], {}) == sentence
    assert with_variable("-n -1: expected 1 or more", [], {"DDPDIAG_N": "1"}) == "-n -1: expected 1 or more"


@pytest.mark.parametrize("name", sorted({*typer.main.get_command(app).commands} - {"checks", "manual"}))
def test_every_command_that_reports_takes_quiet_and_colour(name):
    options = {word for each in typer.main.get_command(app).commands[name].params for word in each.opts}
    assert {"-q", "--quiet", "--color"} <= options


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("che", ["check", "checks"]),
        ("check --st", ["--stage", "--strict"]),
        ("check --stage ", ["launch", "host", "gpu", "rendezvous", "collective", "p2p", "fabric", "training"]),
        ("check --stage gpu,co", ["gpu,collective"]),
        ("check --select COL", ["COL001", "COL002", "COL003"]),
        ("check --backend n", ["nccl"]),
        ("check --depth ", ["quick", "standard", "deep"]),
        ("host --ignore HST00", [f"HST00{number}" for number in range(1, 8)]),
        ("allreduce-bench --collective re", ["reduce_scatter", "reduce"]),
        ("train --strategy single,dd", ["single,ddp"]),
        ("simulate --fault slow-", ["slow-host", "slow-inside", "slow-link"]),
        ("explain pcie-l", ["pcie-link"]),
    ],
)
def test_a_shell_completes_values(ddpdiag, words, values):
    typed = shlex.split(f"ddpdiag {words}") + ([""] if words.endswith(" ") else [])
    variables = {"_DDPDIAG_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    assert ddpdiag.run(MAIN, **variables).stdout.split() == values


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"DDPDIAG_BUDGTE": "30"},
            "DDPDIAG_BUDGTE: no option has this variable, so it has no effect; did you mean DDPDIAG_BUDGET?",
        ),
        ({"DDPDIAG_BUDGTE": "30", "RANK": "1"}, ""),
        ({"DDPDIAG_STALL": "30", "DDPDIAG_TOKEN": "x", "DDPDIAG_SYSFS": "/host/sys"}, ""),
    ],
)
def test_rank_0_names_an_unknown_variable(environment, sentence):
    assert "".join(unknown_variables(typer.main.get_command(app), environment)) == sentence


def test_variables_of_the_product_recipes_and_tests_are_known():
    assert [*unknown_variables(typer.main.get_command(app), dict.fromkeys(RESERVED, "1"))] == []
