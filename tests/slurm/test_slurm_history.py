"""The recipe that checks idle nodes in pairs, run by Slurm, and `ddpdiag history` on what it leaves."""

import json
import sys
import time
from pathlib import Path

import pytest

from ddpdiag.history.store import Store, find_sources

pytestmark = [pytest.mark.slurm, pytest.mark.deep]

RECIPE = Path(__file__).parents[2] / "recipes" / "slurm-idle-pairs.sh"


def test_idle_nodes_are_checked_in_pairs(cluster):
    four = cluster(4)
    reports = four.shared / "reports"
    variables = {
        "REPORTS": str(reports),
        "DDPDIAG": str(Path(sys.executable).parent / "ddpdiag"),
        "CHECK": "--select LCH001,RDZ002",
        "RANKS": "1",
    }
    done = four.run("bash", RECIPE, **variables)
    assert done.returncode == 0, done.stderr
    end = time.monotonic() + 120
    while len(found := list(reports.glob("*/*.json"))) < 2:
        assert time.monotonic() < end, four.call("squeue", "--all")
        time.sleep(0.5)
    hosts = [json.loads(path.read_text())["world"]["hosts"] for path in found]
    assert sorted(host for pair in hosts for host in pair) == ["h0", "h1", "h2", "h3"]
    store = Store()
    assert store.read(find_sources([str(reports)])).problems == ()
    assert len(list(store.runs(0, 1e11))) == 2
