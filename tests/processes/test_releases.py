"""The installed torch does what every release that is claimed must do; `.ci/long torch` tries the others."""

import sys

import pytest
from releases import ATTEMPTS, STRATEGIES, Release, shown, tried


@pytest.mark.deep
def test_the_installed_torch_gives_right_verdicts(tmp_path):
    release = tried(sys.executable, tmp_path)
    assert release.wrong == {}
    assert release.lacks["strategies"] == {}
    assert release.lacks["no NumPy"] == {}
    assert set(release.seconds) == set(ATTEMPTS)


def test_a_row_shows_what_is_wrong_and_what_torch_lacks():
    seconds = dict.fromkeys(ATTEMPTS, 3.0)
    lacks = {"strategies": {"fsdp": "no events"}}
    row, *below = shown(Release("2.6.0", seconds, lacks, {"hang": "blamed: [1]"}))
    assert row.split() == ["2.6.0", "FIT", "FIT", "WRONG", "rank", "2", "works", "works", "cannot"] + ["works"] * (
        len(STRATEGIES) - 3
    ) + ["quiet", "3.0", "s"]
    assert [line.strip() for line in below] == ["WRONG, hang: blamed: [1]", "fsdp: no events"]
