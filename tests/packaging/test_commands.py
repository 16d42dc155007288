"""What the README tells people to type is what is tested."""

from pathlib import Path

import pytest
from dists import ROOT

TRY = "python -m pip install -c constraints.txt '.[watch]' && ddpdiag check"
TEST = "python -m pip install -c constraints.txt -e '.[test]' && python -m pytest -n 3 --dist loadfile"
CI = ROOT / ".ci" / "run"


def lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines()]


@pytest.mark.parametrize("command", [TRY, TEST])
def test_the_readme_has_the_command_on_a_line_of_its_own(command):
    assert command in lines(ROOT / "README.md")


@pytest.mark.skipif(not CI.exists(), reason="an sdist has no .ci/run")
def test_ci_types_what_the_readme_says():
    assert f"{TEST} || exit" in lines(CI)
