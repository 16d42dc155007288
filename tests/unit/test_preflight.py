"""preflight(): from the options and variables of a rank to the command, and from its end to a report or an error."""

import json
import multiprocessing
import os
import pickle
import re
import sys
from pathlib import Path

import pytest
from msgspec import structs

import ddpdiag
from ddpdiag import api
from ddpdiag.codec import encode

HANG = ddpdiag.judge(Path(__file__).parents[1] / "recordings" / "hang-4-ranks.jsonl")
HEALTHY = ddpdiag.judge(Path(__file__).parents[1] / "recordings" / "healthy-2-ranks.jsonl")
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
STUB = """\
#!{python}
import json, os, shutil, sys
case = json.load(open({case!r}))
json.dump([sys.argv[1:], dict(os.environ)], open({seen!r}, "w"))
path, = [word.partition("=")[2] for word in sys.argv if word.startswith("--json=")]
if case["report"]:
    open(path, "w").write(case["report"])
if case["sentence"]:
    json.dump({{"message": {{"message": case["sentence"], "extraInfo": {{}}}}}}, open(os.environ[{variable!r}], "w"))
sys.stderr.write(case["stderr"])
sys.stderr.flush()
os.kill(os.getpid(), -case["code"]) if case["code"] < 0 else sys.exit(case["code"])
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in os.environ:
        if re.match(r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI|DDPDIAG_", name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(api, "RANK_0_FIRST_SECONDS", 0.0)


@pytest.fixture
def check_ends(tmp_path, monkeypatch):
    """check_ends(code, report=..., sentence=..., stderr=...): a check that ends so. seen(): its words and variables."""
    paths = {name: str(tmp_path / name) for name in ("case", "seen", "python")}
    stub = STUB.format(python=sys.executable, case=paths["case"], seen=paths["seen"], variable=api.ERROR_FILE)
    Path(paths["python"]).write_text(stub)
    Path(paths["python"]).chmod(0o755)
    monkeypatch.setattr(sys, "executable", paths["python"])

    def end(code=0, *, report=None, sentence="", stderr=""):
        text = None if report is None else encode(report).decode()
        case = {"code": code, "sentence": sentence, "stderr": stderr}
        Path(paths["case"]).write_text(json.dumps(case | {"report": text}))
        return lambda: json.loads(Path(paths["seen"]).read_text())

    return end


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        (RANK_1, {}, ["--join-timeout=60.0"]),
        (RANK_1, {"budget": 30, "ignore": "P2P"}, ["--join-timeout=60.0", "--ignore=P2P", "--budget=30"]),
        (RANK_1 | {"DDPDIAG_JOIN_TIMEOUT": "5"}, {}, []),
        ({}, {}, ["--join-timeout=60.0", "--nproc-per-node=1"]),
        ({}, {"nproc_per_node": 8, "select": ["RDZ", "COL"]}, ["--nproc-per-node=8", "--select=RDZ", "--select=COL"]),
        ({"MASTER_ADDR": "n0"}, {"rank": 1, "world_size": 2, "strict": True}, ["--rank=1", "--strict"]),
    ],
    ids=["torchrun", "options", "variable wins", "no launcher", "notebook", "by arguments"],
)
def test_the_check_gets_the_options_and_defaults_of_a_rank(check_ends, monkeypatch, variables, options, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen, before = check_ends(), dict(os.environ)
    ddpdiag.preflight(**options)
    words, environ = seen()
    assert words[:3] == ["-P", "-m", "ddpdiag.child"]
    assert [words[3], *words[5:7]] == [str(os.getpid()), "check", "--quiet"]
    assert set(expected) <= set(words[8:])
    assert variables.items() <= environ.items()
    assert not any(word.startswith("--nproc-per-node") for word in words) or "RANK" not in variables
    assert dict(os.environ) == before
    assert words[4] == str(Path(environ[api.ERROR_FILE]).parent)
    assert not Path(words[4]).exists()


@pytest.mark.parametrize(
    ("end", "options", "verdict", "sentence"),
    [
        ({"code": 0, "report": HEALTHY}, {}, "FIT", HEALTHY.sentence),
        ({"code": 0}, {}, "FIT", "rank 0 has the report"),
        ({"code": 3, "sentence": "no time"}, {"on_unknown": "go"}, "UNKNOWN", "no time"),
    ],
    ids=["rank 0", "another rank", "unknown"],
)
def test_a_job_that_may_start_gets_a_report(check_ends, monkeypatch, end, options, verdict, sentence):
    [monkeypatch.setenv(name, value) for name, value in RANK_1.items()]
    check_ends(**end)
    report = ddpdiag.preflight(**options)
    assert (report.verdict_text, report.sentence, report.exit_code) == (verdict, sentence, end["code"])
    assert report.recording_problems == () or "rank 1 of 2" in report.recording_problems[0]


@pytest.mark.parametrize(
    ("end", "options", "text"),
    [
        ({"code": 1, "report": HANG}, {}, str(HANG)),
        ({"code": 1, "sentence": "rank 1 hung"}, {}, "UNFIT: rank 1 hung"),
        ({"code": 3, "sentence": "no time"}, {}, "UNKNOWN: no time"),
        # This rank left the run, so the others may not know that it goes on.
        (
            {"code": 3, "sentence": "no rank 0", "stderr": "ddpdiag: no rank 0; look\n"},
            {"on_unknown": "go"},
            "no rank 0; l",
        ),
        ({"code": 130, "report": structs.replace(HEALTHY, exit_code=130)}, {"on_unknown": "go"}, str(HEALTHY)),
        ({"code": -9}, {"on_unknown": "go"}, "UNKNOWN: the check exited with -9"),
        ({"code": 4, "stderr": "Traceback ...\nNameError: x\n"}, {"on_unknown": "go"}, "UNKNOWN: NameError: x"),
    ],
    ids=["rank 0", "another rank", "unknown", "lost", "interrupted", "killed", "bug"],
)
def test_a_job_that_must_not_start_gets_an_error(check_ends, monkeypatch, end, options, text):
    [monkeypatch.setenv(name, value) for name, value in RANK_1.items()]
    check_ends(**end)
    with pytest.raises(ddpdiag.UnfitError, match=re.escape(text)) as caught:
        ddpdiag.preflight(**options)
    assert caught.value.report.exit_code == end["code"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    has_errors = any(finding.severity is ddpdiag.Severity.ERROR for finding in caught.value.report.findings)
    assert ("error RUN003.hung" in "".join(getattr(caught.value, "__notes__", ""))) == has_errors


def test_the_report_of_an_earlier_run_is_not_returned(check_ends, monkeypatch, tmp_path):
    [monkeypatch.setenv(name, value) for name, value in RANK_1.items()]
    path = tmp_path / "run.json"
    path.write_bytes(encode(HEALTHY))
    check_ends()
    assert ddpdiag.preflight(json=str(path)).sentence == "rank 0 has the report"
    check_ends(report=structs.replace(HEALTHY, sentence="of this run"))
    assert ddpdiag.preflight(json=str(path)).sentence == "of this run"


def test_the_rendezvous_of_a_job_that_has_met_is_left_out(check_ends, monkeypatch):
    class Dist:
        is_available = is_initialized = staticmethod(lambda: True)
        get_world_size = staticmethod(lambda: 2)

    monkeypatch.setitem(sys.modules, "torch.distributed", Dist)
    seen = check_ends()
    with pytest.raises(ddpdiag.UsageError, match="the process group has 2 ranks, but RANK is not set"):
        ddpdiag.preflight()
    [monkeypatch.setenv(name, value) for name, value in RANK_1.items()]
    ddpdiag.preflight(ignore=["P2P"])
    assert [word for word in seen()[0] if "ignore" in word] == ["--ignore=P2P", "--ignore=RDZ001", "--ignore=RDZ005"]


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}], ids=["none", "addr"])
def test_a_spawned_process_without_a_rank_is_refused(check_ends, monkeypatch, variables):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    [monkeypatch.setenv(name, value) for name, value in variables.items()]
    with pytest.raises(ddpdiag.UsageError, match="multiprocessing started this process, but RANK is not set"):
        ddpdiag.preflight()


def test_wrong_options_are_refused(check_ends):
    check_ends(2, stderr="ddpdiag: no such option: --bogus\n")
    with pytest.raises(ddpdiag.UsageError, match=r"^no such option: --bogus$"):
        ddpdiag.preflight(bogus=1)
    with pytest.raises(ddpdiag.UsageError, match="expected 'raise' or 'go'"):
        ddpdiag.preflight(on_unknown="stop")
