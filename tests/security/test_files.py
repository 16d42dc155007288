"""Files in folders like /tmp, where strangers make files, links and folders too."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.render import files
from ddpdiag.runtime.record import run_folder

STRANGER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("untouched")
    return path


def by_a_stranger(path: Path) -> Path:
    os.lchown(path, STRANGER, STRANGER)
    return path


def direct(sticky: Path, victim: Path) -> Path:
    path = sticky / "report.json"
    path.symlink_to(victim)
    by_a_stranger(path)
    return path


def through_a_folder(sticky: Path, victim: Path) -> Path:
    (sticky / "out").symlink_to(victim.parent)
    by_a_stranger(sticky / "out")
    return sticky / "out" / victim.name


def behind_our_own(sticky: Path, victim: Path) -> Path:
    path = victim.parent / "report.json"
    path.symlink_to(direct(sticky, victim))
    return path


@pytest.mark.parametrize("made", [direct, through_a_folder, behind_our_own])
def test_no_output_goes_through_a_link_of_a_stranger(made: Callable, sticky: Path, victim: Path) -> None:
    path = made(sticky, victim)
    for write in (lambda: files.write(str(path), "report"), lambda: files.check_writable(str(path))):
        with pytest.raises(UsageError, match=f"is a link that user {STRANGER} made"):
            write()
    assert victim.read_text() == "untouched"


def test_our_own_links_are_followed(sticky: Path, victim: Path) -> None:
    path = sticky / "report.json"
    path.symlink_to(os.path.relpath(victim, sticky))
    files.write(str(path), "report")
    assert (path.is_symlink(), victim.read_text()) == (True, "report")


def test_links_without_end_are_refused(sticky: Path) -> None:
    (sticky / "a").symlink_to("b")
    (sticky / "b").symlink_to("a")
    with pytest.raises(UsageError, match="symbolic links"):
        files.write(str(sticky / "a"), "report")


def a_link(folder: Path, own: Path) -> None:
    folder.symlink_to(own)


def a_folder(folder: Path, own: Path) -> None:
    folder.mkdir()


def one_that_all_may_write_to(folder: Path, own: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize("made", [a_link, a_folder, one_that_all_may_write_to])
def test_the_folder_of_a_stranger_is_not_taken_for_our_own(
    made: Callable, sticky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(sticky))
    own = tmp_path / "own"
    own.mkdir()
    made(sticky / "ddpdiag-run", own)
    if made is not one_that_all_may_write_to:
        by_a_stranger(sticky / "ddpdiag-run")
    folder = run_folder("run")
    assert folder.name.startswith("ddpdiag-run-")
    assert folder.stat().st_mode & 0o777 == 0o700
