"""Build the one-file program: python .ci/build_pyz.py WHEEL TARGET

The file holds the wheel of ddpdiag and the packages that it needs, as they are installed in this environment, apart
from torch. It is made by zipapp of the standard library: shiv's file imports from any folder with the right name,
without a look at its owner, and ends in a traceback for a user without a home directory.
"""

import compileall
import hashlib
import importlib.metadata
import json
import os
import py_compile
import shutil
import sys
import tempfile
import zipapp
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

# For --html.
EXTRAS = ("Jinja2",)
LEFT_OUT = ("torch",)
# Files that say where and how a package was installed, and those that only compilers and type checkers read.
USELESS_NAMES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
USELESS_SUFFIXES = (".pyi", ".pyx", ".pxd", ".pxi", ".h", ".c", ".pyc")
USELESS_FOLDERS = ("tests",)


def needed(requirements: list[str]) -> Iterator[str]:
    """Yield the names of all packages that these requirements need, directly or not."""
    waiting, known = [*requirements], {name.lower() for name in LEFT_OUT}
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name.lower() in known or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(requirement.name.lower())
        yield requirement.name
        waiting += importlib.metadata.requires(requirement.name) or ()


def copy_package(name: str, site: Path) -> None:
    """Copy the files of an installed package, but not its programs."""
    for file in importlib.metadata.files(name) or ():
        # rich loads lexers by name, to colour the source code of languages. ddpdiag shows none.
        is_lexer = file.parts[:2] == ("pygments", "lexers") and not file.name.startswith("_")
        is_useless = is_lexer or file.name in USELESS_NAMES or file.suffix in USELESS_SUFFIXES
        if not is_useless and ".." not in file.parts and not {*file.parts[:-1]}.intersection(USELESS_FOLDERS):
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)


def build(wheel: Path, target: Path, stage: Path) -> None:
    """Put the parts of the program together in the folder `stage`, and write it to `target`."""
    site = stage / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = importlib.metadata.PathDistribution((site / metadata).parent).requires or []
    for name in needed([*requirements, *EXTRAS]):
        copy_package(name, site)
    # Not compared with the sources at an import: no other program writes to the unpacked folder.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(site, quiet=1, stripdir=str(site), invalidation_mode=unchecked)
    shutil.copyfile(Path(__file__).with_name("pyz_main.py"), stage / "__main__.py")
    files = sorted(path for path in stage.rglob("*") if path.is_file())
    contents = (path.relative_to(stage).as_posix().encode() + b"\0" + path.read_bytes() for path in files)
    name = hashlib.sha256(b"".join(contents)).hexdigest()[:16]
    python = [sys.implementation.cache_tag, os.uname().machine]
    (stage / "build.json").write_text(json.dumps({"name": name, "python": python}))
    zipapp.create_archive(stage, target, "/usr/bin/env -S python3 -I", compressed=True)
    target.chmod(0o755)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"expected one wheel and a target, got {' '.join(sys.argv[1:])}: remove older wheels")
    with tempfile.TemporaryDirectory() as folder:
        build(Path(sys.argv[1]), Path(sys.argv[2]), Path(folder))
