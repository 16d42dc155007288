"""The README's pictures are what the tool says today."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from make_screenshots import FOLDER, SHOTS, draw


@pytest.mark.parametrize("name", SHOTS)
def test_a_picture_is_not_stale(name):
    drawn = draw(name)
    assert drawn == (FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "run tests/tools/make_screenshots.py and look"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_the_readme_shows_them():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert [name for name in SHOTS if f"tests/screenshots/{name}.svg" not in text] == []
