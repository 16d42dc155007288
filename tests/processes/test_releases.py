"""The installed torch does what every release that is claimed must do; `.ci/long torch` tries the others."""

import sys

import pytest
from releases import ATTEMPTS, tried


@pytest.mark.deep
def test_the_installed_torch_gives_right_verdicts(tmp_path):
    release = tried(sys.executable, tmp_path)
    assert release.wrong == {}
    assert release.lacks["strategies"] == {}
    assert release.lacks["no NumPy"] == {}
    assert set(release.seconds) == set(ATTEMPTS)
