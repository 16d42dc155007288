"""The same tests in every process: pytest-xdist stops where its workers collect others."""

import subprocess
import sys

import pytest
from dists import ROOT


# Of the tests that it runs, xdist compares what its own two workers collected.
@pytest.mark.deep
def test_two_processes_collect_the_same_tests():
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
    collected = []
    # One after the other: a name that holds the time would be another one.
    for seed in ("1", "2"):
        done = subprocess.run(["env", f"PYTHONHASHSEED={seed}", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        collected.append([line for line in done.stdout.splitlines() if "::" in line])
    assert len(collected[0]) > 1000
    assert collected[0] == collected[1]
