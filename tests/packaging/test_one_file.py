"""ddpdiag.pyz: one file that a Python without packages starts, for any user, in any folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dists import ROOT, run

pytestmark = pytest.mark.deep
RECORDINGS = ROOT / "tests" / "recordings"
HEALTHY = RECORDINGS / "healthy-2-ranks.jsonl"
# In the current directory, each module of these names says so when it is imported.
NAMES = ("ddpdiag", "msgspec", "typer", "json", "zipfile")
EVIL = "raise SystemExit('EVIL')\n"
# A Python of this version that other users may start as well; that of the tests may lie in the home of root.
COMMON_PYTHON = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
as_nobody = pytest.mark.skipif(
    os.getuid() != 0 or COMMON_PYTHON is None, reason="needs root, and this Python for all users"
)


@pytest.fixture(scope="session")
def pyz(built, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    run(sys.executable, ROOT / ".ci" / "build_pyz.py", built.wheel, folder / "ddpdiag.pyz", cwd=folder)
    return folder / "ddpdiag.pyz"


@pytest.fixture
def place():
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def start(pyz, place):
    """start("host", HOME=...): the program, running in a folder with modules of strangers."""
    for name in ("home", "tmp", "work"):
        (place / name).mkdir()
    for name in NAMES:
        (place / "work" / f"{name}.py").write_text(EVIL)
    shutil.copy(pyz, place)

    def started(*words, user="", python=sys.executable, **variables):
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(place / "home"), "TMPDIR": str(place / "tmp")}
        # -S: without the packages of this environment, torch among them.
        command = [python, "-I", "-S", place / "ddpdiag.pyz", *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        where = {"cwd": place / "work", "env": environ | variables}
        return subprocess.Popen(command, **pipes, **where, text=True, user=user or None)

    return started


def told(process: subprocess.Popen) -> tuple[int, str]:
    text, _ = process.communicate(timeout=60)
    return process.returncode, text


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        (["host"], None, "host"),
        (["explain", "COL001"], 0, "COL001"),
        (["explain", "NCCL WARN Duplicate GPU detected"], 0, "GPU002"),
        (["judge", HEALTHY, "--html", "page.html"], 0, "FIT"),
        (["compare", HEALTHY, HEALTHY], 3, "NOT COMPARED"),
        (["lint", ROOT / "recipes" / "train_ddp.py"], 0, ""),
        (["simulate", "--hosts", "8", "--fault", "slow-host:1"], 0, "FIT, degraded"),
        (["history", RECORDINGS], 3, "runs"),
        (["check", "--help"], 0, "--nproc-per-node"),
        *((command, 2, "needs torch") for command in (["check"], ["bench"], ["train"], ["host", "--torch"])),
    ],
)
def test_commands_work_without_torch_or_say_what_is_missing(start, place, words, code, word):
    left, text = told(start(*words))
    assert left in ((0, 1, 3) if code is None else (code,)), text
    assert word in text
    assert "EVIL" not in text
    assert "Traceback" not in text
    assert len(list((place / "home/.cache/ddpdiag").iterdir())) == 1
    assert not list((place / "tmp").iterdir())


def test_starts_at_once_share_one_folder(start, place):
    both = [start("explain", "COL001") for _ in range(3)]
    assert [told(process)[0] for process in both] == [0, 0, 0]
    (folder,) = (place / "home/.cache/ddpdiag").iterdir()
    assert folder.stat().st_mode & 0o077 == 0


@as_nobody
def test_another_user_without_a_home_leaves_nothing(start, place):
    (place / "tmp").chmod(0o1777)
    code, text = told(start("host", user="nobody", python=COMMON_PYTHON, HOME="/nonexistent"))
    assert code in (0, 1, 3), text
    assert not list((place / "tmp").iterdir())
    reading = start("lint", "-", user="nobody", python=COMMON_PYTHON, HOME="/nonexistent")
    while not list((place / "tmp").glob("ddpdiag-*/site/ddpdiag/lint/command.py")):
        assert reading.poll() is None
    reading.send_signal(signal.SIGTERM)
    assert told(reading)[0] == -signal.SIGTERM
    assert not list((place / "tmp").iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder to another user")
def test_root_makes_nothing_in_the_home_of_another_user(start, place):
    shutil.chown(place / "home", "nobody")
    assert told(start("--version"))[0] == 0
    assert not list((place / "home").iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder to another user")
@pytest.mark.parametrize("prepare", ["owner", "mode", "above", "link"])
def test_a_folder_that_another_user_may_have_prepared_is_not_used(start, place, prepare):
    cache = place / "cache"
    told(start("--version", XDG_CACHE_HOME=str(cache)))
    (build,) = (cache / "ddpdiag").iterdir()
    (build / "site/ddpdiag/__init__.py").write_text(EVIL)
    shutil.rmtree(build / "site/ddpdiag/__pycache__")
    assert "EVIL" in told(start("--version", XDG_CACHE_HOME=str(cache)))[1]
    match prepare:
        case "owner":
            shutil.chown(build, "nobody")
        case "mode":
            build.chmod(0o777)
            for each in (cache, cache / "ddpdiag"):
                each.chmod(0o755)
        case "above":
            cache.chmod(0o777)
        case "link":
            build.rename(place / "elsewhere")
            build.symlink_to(place / "elsewhere")
    code, text = told(start("--version", XDG_CACHE_HOME=str(cache)))
    assert (code, bool(re.fullmatch(r"ddpdiag \S+\n", text))) == (0, True), text


def test_another_python_is_told_which_one_it_needs(start, place):
    minors = [minor for minor in range(9, 30) if minor != sys.version_info.minor]
    found = [path for minor in minors if (path := shutil.which(f"python3.{minor}"))]
    # A wrapper of pyenv may have the name of a version that is not installed.
    working = [path for path in found if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]
    if not working:
        pytest.skip("needs another version of Python")
    other = working[0]
    code, text = told(start("host", python=other))
    assert (code, text.count("\n"), "built for cpython-3" in text) == (2, 1, True), text
