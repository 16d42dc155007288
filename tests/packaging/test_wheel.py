"""What is published is whole, and trains where nothing of this tree is at hand."""

import json
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from dists import build, environment, run, show_ours, site_packages, wheel_contents
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DATA = {
    "ddpdiag/data/mnist/LICENSE",
    "ddpdiag/data/mnist/NOTICE",
    "ddpdiag/data/mnist/t10k-images-idx3-ubyte.gz",
    "ddpdiag/data/mnist/t10k-labels-idx1-ubyte.gz",
    "ddpdiag/data/mnist/train-images-idx3-ubyte.gz",
    "ddpdiag/data/mnist/train-labels-idx1-ubyte.gz",
    *(
        f"ddpdiag/explain/cards/{name}.toml"
        for name in ("slurm", "cuda", "ib", "nccl", "torch_nccl", "c10d", "ddp", "training", "torchrun", "unknown")
    ),
}


def test_the_wheel_is_the_package_and_its_data(built):
    names = {name for name in wheel_contents(built.wheel) if ".dist-info/" not in name}
    assert names == {name for name in built.tree if name.startswith("ddpdiag/")}
    assert names >= DATA


def test_the_sdist_has_what_tests_and_readers_need(built):
    assert built.tree - built.sdist_names == set()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"} - built.sdist_names == set()
    assert {name.partition("/")[0] for name in built.tree} == {"ddpdiag", "recipes", "tests"}


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    run("tar", "-xzf", built.sdist, cwd=tmp_path)
    (source,) = tmp_path.iterdir()
    target = tmp_path / "dist"
    target.mkdir()
    build(source, target, "--wheel")
    (wheel,) = target.glob("*.whl")
    assert wheel_contents(wheel) == wheel_contents(built.wheel)


@pytest.fixture
def elsewhere(built, tmp_path) -> Path:
    """The bin folder of an environment with the wheel, in which this tree cannot be imported."""
    folder = tmp_path / "environment"
    python = environment(folder)
    install = ("-m", "pip", "--python", python, "install", "--no-index", "--no-deps", built.wheel)
    run(sys.executable, *install, cwd=tmp_path)
    # Only now, lest pip should take our own ddpdiag for an older one that has to go.
    show_ours(folder)
    return python.parent


def test_the_installed_wheel_trains(elsewhere, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    where = run(elsewhere / "python", "-c", "import ddpdiag; print(ddpdiag.__file__)", cwd=work)
    assert Path(where.strip()).is_relative_to(site_packages(elsewhere.parent))
    train = ("train", "--nproc-per-node", "2", "--strategy", "ddp", "--steps", "4", "--json", "report.json")
    said = run(elsewhere / "ddpdiag", *train, cwd=work)
    report = json.loads((work / "report.json").read_text())
    assert (report["verdict"], report["exit_code"]) == ("fit", 0), said
    assert [row["status"] for row in report["train"]["rows"]] == ["works", "works"], said
    assert sorted(path.name for path in work.iterdir()) == ["report.json"]


# What package indexes and pip read -----------------------------------------------------------------------------------


def test_the_licence_covers_code_and_digits(built):
    assert built.metadata["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"
    files = built.metadata.get_all("License-File")
    assert sorted(files) == ["LICENSE", "ddpdiag/data/mnist/LICENSE", "ddpdiag/data/mnist/NOTICE"]


def test_the_command_and_the_plug_ins_of_torchrun_are_ddpdiag(built):
    points = ConfigParser()
    points.read_string(built.in_wheel(".dist-info/entry_points.txt"))
    assert points["console_scripts"]["ddpdiag"] == "ddpdiag.cli:main"
    assert [(section, *points[section]) for section in points.sections()[1:]] == [
        ("torchrun.handlers", "ddpdiag"),
        ("torchrun.logs_specs", "ddpdiag"),
    ]


def test_python_3_11_and_all_later_ones_will_do(built):
    allowed = SpecifierSet(built.metadata["Requires-Python"])
    assert not allowed.contains("3.10.14")
    assert all(allowed.contains(version) for version in ("3.11.0", "3.14.0", "3.99"))


def test_torch_has_no_upper_cap(built):
    requirements = map(Requirement, built.metadata.get_all("Requires-Dist"))
    (torch,) = [requirement for requirement in requirements if requirement.name == "torch"]
    assert {part.operator for part in torch.specifier} == {">="}
    for version in ("2.6.0a0+git123", "2.7.1+vendor.1", "2.13.0", "3.0.0.dev20270101+cu140", "99.0"):
        assert torch.specifier.contains(version), version
