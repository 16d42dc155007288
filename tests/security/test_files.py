"""Files in folders like /tmp, where strangers make files, links and folders too."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from readers import HEALTHY, READERS

from ddpdiag.errors import UsageError, UserError
from ddpdiag.model import Header, RunOptions
from ddpdiag.probes.host.shared_files import open_private_folder
from ddpdiag.render import files
from ddpdiag.runtime.record import SharedRecord, make_run_folder

STRANGER = 65534


@pytest.fixture
def alarm() -> Iterator[None]:
    """What waits for ever ends with a failure."""

    def ring(*_signal: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make files of another user")
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


@pytest.mark.parametrize("made", [lambda path: path.write_text("theirs"), os.mkfifo], ids=["file", "pipe"])
def test_no_output_goes_to_a_file_or_pipe_of_a_stranger(made: Callable[[Path], None], sticky: Path) -> None:
    path = sticky / "report.html"
    made(path)
    by_a_stranger(path)
    before = path.stat()
    # Who waits at the other end of a pipe may read nothing.
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    for write in (lambda: files.write(str(path), "report"), lambda: files.check_writable(str(path))):
        with pytest.raises(UsageError, match=f"that user {STRANGER} made"):
            write()
    assert path.stat().st_ino == before.st_ino
    assert os.read(reader, 100) in (b"", b"theirs")
    os.close(reader)


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
    folder = make_run_folder("run")
    assert folder.name.startswith("ddpdiag-run-")
    assert folder.stat().st_mode & 0o777 == 0o700


HEADER = Header(run_id="r", world_size=2, launcher="hand", options=RunOptions(), created="", version="0.1.0")


@pytest.mark.parametrize("moment", ["before", "meanwhile", "a file"])
def test_a_colleague_s_link_leads_no_shared_record_elsewhere(tmp_path: Path, moment: str) -> None:
    home, shared_dir = tmp_path / "home", tmp_path / "shared"
    home.mkdir(mode=0o700)
    shared_dir.mkdir()
    shared_dir.chmod(0o2770)
    for name in ("run.jsonl", "rank-1.jsonl"):
        (home / name).write_text("untouched")
    folder = shared_dir / "ddpdiag-r-abcd"
    if moment == "before":
        folder.symlink_to(home)
    elif moment == "a file":
        folder.mkdir()
        (folder / "rank-1.jsonl").symlink_to(home / "rank-1.jsonl")
    records = [SharedRecord(str(shared_dir), "r", name) for name in ("run.jsonl", "rank-1.jsonl")]
    for record in records:
        record.write(HEADER)
        record.open("abcd")
        assert (record.keep() is None) == (moment == "before")
    if moment == "meanwhile":
        folder.rename(tmp_path / "moved")
        folder.symlink_to(home)
    for record in records:
        record.write(HEADER)
        record.remove(all_files=True)
    assert {path.name: path.read_text() for path in home.iterdir()} == dict.fromkeys(
        ("run.jsonl", "rank-1.jsonl"), "untouched"
    )


@pytest.mark.parametrize("made", [a_link, a_folder])
def test_no_rendezvous_file_is_opened_in_a_folder_of_a_stranger(made: Callable, sticky: Path, tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    made(sticky / "ddpdiag-r-abcd", own)
    by_a_stranger(sticky / "ddpdiag-r-abcd")
    with pytest.raises(OSError, match=r"Not a directory|others may write"):
        open_private_folder(sticky / "ddpdiag-r-abcd")


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_the_writer_of_a_pipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    os.mkfifo(path)
    said = ""
    try:
        READERS[name].read(path)
    except UserError as error:
        said = str(error)
    assert f"{path}" in said + capsys.readouterr().err


def test_what_a_shell_pipes_in_is_read() -> None:
    words = f"{sys.executable} -m ddpdiag judge <(cat {HEALTHY})"
    assert subprocess.run(["bash", "-c", words], capture_output=True, timeout=60, check=False).returncode == 0
