"""The wheel and the sdist of this tree, built once."""

import pytest
from dists import ROOT, Built, build, tree


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Built:
    """Wheel and sdist, each from this tree."""
    target = tmp_path_factory.mktemp("dist")
    files = tree("ddpdiag", "tests", "recipes")
    build(ROOT, target, "--wheel", "--sdist")
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return Built(wheel, sdist, files)
