"""Build this tree, look into what came of it, and make environments to install it in; all without network."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What the gallery of faults writes, and git ignores.
_SCOREBOARD = "tests/faults/scoreboard.json"


def run(*command: object, cwd: Path, variables: Mapping[str, str] | None = None, seconds: float = 120.0) -> str:
    """What a command prints; an AssertionError with all it said when it fails.

    PYTHON* and PIP_* of the caller do not count: they could add packages, or an index.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environ | ours | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command} left with {done.returncode}:\n{done.stdout}"
    return done.stdout


def build(source: Path, target: Path, *kinds: str) -> None:
    """Build `kinds` (--wheel, --sdist) of `source` into `target`, with the build backend that is installed here."""
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", target, source, cwd=target.parent)


@dataclass(frozen=True)
class Built:
    """Files that would be published, and those of the tree from which they were built."""

    wheel: Path
    sdist: Path
    tree: frozenset[str]

    def in_wheel(self, suffix: str) -> str:
        """The text of the wheel's only file that ends so."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
            return archive.read(name).decode()

    @property
    def metadata(self) -> Message:
        """The wheel's METADATA."""
        return Parser().parsestr(self.in_wheel(".dist-info/METADATA"))

    @property
    def sdist_names(self) -> set[str]:
        """Files in the sdist, without its top folder."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive if member.isfile()}


def tree(*tops: str) -> frozenset[str]:
    """Files below these folders of this tree, as git would list them."""
    paths = [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT).as_posix() for path in paths} - {_SCOREBOARD}
    # Of hidden folders, all are what tools leave behind.
    return frozenset(name for name in names if "__pycache__" not in name and "/." not in name)


def wheel_contents(wheel: Path) -> dict[str, bytes]:
    """Each file's bytes by its name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def environment(folder: Path) -> Path:
    """The Python of a new virtual environment, without pip: `pip --python` serves it from ours."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def show_ours(folder: Path) -> None:
    """Let an environment import what is installed in ours, after its own packages.

    .pth files in a folder that a .pth file adds are not read: the editable install of this tree, and so this tree, stay
    out of its sight.
    """
    ours = [path for path in sys.path if path.endswith("-packages")]
    (site_packages(folder) / "ours.pth").write_text("\n".join(ours) + "\n")


def site_packages(folder: Path) -> Path:
    """Where a virtual environment keeps its packages."""
    (path,) = folder.glob("lib/python*/site-packages")
    return path
