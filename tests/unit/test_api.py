"""The Python API: the same reports as the command line's."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

import ddpdiag

RECORDINGS = Path(__file__).parents[1] / "recordings"


def test_a_recording_is_judged():
    report = ddpdiag.judge(RECORDINGS / "healthy-2-ranks.jsonl")
    assert (report.verdict, report.exit_code) == (ddpdiag.Verdict.FIT, 0)
    hang = ddpdiag.judge(RECORDINGS / "hang-4-ranks.jsonl")
    assert hang.verdict is ddpdiag.Verdict.UNFIT
    assert all(isinstance(finding, ddpdiag.Finding) for finding in hang.findings)


def test_a_printed_report_is_its_verdict():
    report = ddpdiag.judge(RECORDINGS / "hang-4-ranks.jsonl")
    assert str(report) == f"UNFIT: {report.sentence}"
    healthy = ddpdiag.judge(RECORDINGS / "healthy-2-ranks.jsonl")
    assert str(structs.replace(healthy, degraded=True)).startswith("FIT, degraded: ")


def test_a_text_is_explained():
    explanation = ddpdiag.explain_text(
        "ncclInvalidUsage: NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on 1b000"
    )
    assert explanation.is_explained
    assert not ddpdiag.explain_text("all is well").is_explained


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ddpdiag.UsageError):
        ddpdiag.judge(path)


def test_wrong_options_are_refused_in_one_sentence():
    with pytest.raises(ddpdiag.UsageError, match=r"^--stage gpus: unknown stage"):
        ddpdiag.check(stage=["gpus"])
    with pytest.raises(ddpdiag.UsageError, match="no such option"):
        ddpdiag.check(bogus=1)


def test_the_api_is_imported_at_its_first_use_and_without_torch():
    code = (
        "import ddpdiag, sys; assert 'ddpdiag.api' not in sys.modules; ddpdiag.check; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"Report", "check", "explain_text", "judge", "preflight"} <= {*dir(ddpdiag)} == {*ddpdiag.__all__}
    assert all(hasattr(ddpdiag, name) for name in ddpdiag.__all__)


def test_there_is_nothing_else():
    with pytest.raises(AttributeError, match="nothing"):
        _ = ddpdiag.nothing
