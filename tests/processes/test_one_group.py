"""The process group over all ranks is shared by the trials that use it, counted where groups are opened.

The backend is a stand-in for NCCL (tests/inject/standin.py): a group of gloo is closed after each trial.
"""

import json
from pathlib import Path

import pytest
from jobs import CHECK, Start

OPTIONS = ("--nproc-per-node", "2", "--backend", "standin", "--json", "{json}")


def opened(start: Start, tmp_path: Path, *options: str, faults: tuple[dict, ...] = ()) -> tuple[int, dict]:
    count = tmp_path / "groups"
    job = start(
        *CHECK, *OPTIONS, *options, DDPDIAG_TEST_COUNT=str(count), DDPDIAG_TEST_STANDIN=json.dumps(list(faults))
    )
    job.wait(110)
    return len(count.read_text()), json.loads(job.json.read_text())


@pytest.mark.deep
def test_a_healthy_check_opens_one_group(start: Start, tmp_path: Path) -> None:
    groups, report = opened(start, tmp_path)
    assert (groups, report["verdict"]) == (1, "fit")


@pytest.mark.deep
def test_after_a_failure_the_group_is_opened_anew(start: Start, tmp_path: Path) -> None:
    """The first group fails, and no later one."""
    wrong = {"kind": "raise", "at": [0]}
    groups, report = opened(start, tmp_path, "--select", "COL001,P2P003,TRN003", faults=(wrong,))
    assert groups > 1
    assert "P2P003.transient" in {finding["code"] for finding in report["findings"]}
