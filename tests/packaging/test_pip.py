"""`pip install .` where torch is installed already: pip's own resolver is content with it, and leaves it alone.

The index is a folder of stub wheels, hand-made here: every dependency at the version installed in this environment, so
a newer torch is within pip's reach, and nothing is downloaded.
"""

import importlib.metadata
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from dists import ROOT, environment, run, site_packages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BACKEND = ("hatchling", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers")


def stub(folder: Path, name: str, version: str) -> Path:
    """The smallest wheel that pip takes."""
    module = name.replace("-", "_").lower()
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def link_backend(folder: Path) -> Path:
    """A folder with the build backend of this environment and nothing else, for --no-build-isolation."""
    folder.mkdir()
    for name in BACKEND:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(distribution.locate_file(top))
    return folder


@dataclass(frozen=True)
class Site:
    """An environment with some torch, and an index with stubs."""

    folder: Path
    python: Path
    index: Path

    @property
    def offline(self) -> tuple[object, ...]:
        return ("--no-index", "--find-links", self.index)

    def pip(self, *arguments: object, **variables: str) -> str:
        command = (sys.executable, "-m", "pip", "--python", self.python, *arguments)
        return run(*command, cwd=self.folder.parent, variables=variables)

    def installed(self, name: str) -> list[str]:
        """Versions of a package that lie there; two would be a broken environment."""
        found = importlib.metadata.distributions(path=[str(site_packages(self.folder))])
        return [item.version for item in found if canonicalize_name(item.name) == canonicalize_name(name)]

    def install_this(self) -> None:
        """The command of the README, as far as it can go without network."""
        backend = link_backend(self.folder.parent / "backend")
        self.pip("install", *self.offline, "--no-build-isolation", ROOT, PYTHONPATH=str(backend))


@pytest.fixture(scope="session")
def dependencies(built) -> list[str]:
    """Names of what ddpdiag needs at run time."""
    requirements = [Requirement(line) for line in built.metadata.get_all("Requires-Dist")]
    return [requirement.name for requirement in requirements if requirement.marker is None]


@pytest.fixture
def site_with(dependencies, tmp_path):
    """site_with(version): an environment that has this torch and nothing else."""

    def made(version: str) -> Site:
        index = tmp_path / "index"
        index.mkdir()
        for name in dependencies:
            stub(index, name, importlib.metadata.version(name).partition("+")[0])
        folder = tmp_path / "environment"
        site = Site(folder, environment(folder), index)
        site.pip("install", "--no-index", "--no-deps", stub(tmp_path, "torch", version))
        return site

    return made


@pytest.mark.deep
@pytest.mark.parametrize("version", ["2.6.0a0+git123", "2.7.1+vendor.1"])
def test_a_torch_of_the_users_stays_and_one_that_is_too_old_does_not(built, site_with, dependencies, version, tmp_path):
    site = site_with(version)
    torch = site_packages(site.folder) / "torch" / "__init__.py"
    before = torch.stat()
    site.install_this()
    assert site.installed("torch") == [version]
    assert (torch.stat().st_ino, torch.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert all(len(site.installed(name)) == 1 for name in ["ddpdiag", *dependencies])
    site.pip("check")
    # Also the proof that pip could have replaced the other one.
    site.pip("install", "--no-index", "--no-deps", stub(tmp_path, "torch", "2.5.1"))
    site.pip("install", *site.offline, built.wheel)
    assert site.installed("torch") == [importlib.metadata.version("torch").partition("+")[0]]
