"""Logs of several lines, assembled from what users posted in public threads: the cause is named before its echoes."""

import tomllib
from pathlib import Path

import pytest

from ddpdiag.explain.card import Role
from ddpdiag.explain.matcher import explain_log

# What torchrun prints under any of them.
TORCHRUN = """\
[2024-03-05 07:01:51,123] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  host      : vm0
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 69811)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""

LOGS = tomllib.loads((Path(__file__).parent.parent / "data" / "posted_logs.toml").read_text("utf-8"))


@pytest.mark.parametrize(("name", "log"), LOGS["failed"].items(), ids=LOGS["failed"])
def test_the_cause_is_named_first(name: str, log: str) -> None:
    found = explain_log([(log + TORCHRUN).encode()], "job.log")
    assert found.sightings[0].card.name == name, [one.card.name for one in found.sightings]


@pytest.mark.parametrize("log", LOGS["healthy"].values(), ids=LOGS["healthy"])
def test_a_job_that_went_well_prints_notes_only(log: str) -> None:
    found = explain_log([log.encode()], "job.log")
    assert [one.card.name for one in found.sightings if one.card.role is not Role.NOTE] == []
