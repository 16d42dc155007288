"""Where texts go: whole, or not at all."""

import io
import os
import stat

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.render.files import check_writable, write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("old", [None, "old and much longer"], ids=["new", "replaced"])
def test_a_text_is_written_with_a_mode_by_the_umask(tmp_path, old):
    path = tmp_path / "report.txt"
    if old:
        path.write_text(old)
        path.chmod(0o640)
    before = os.umask(0o027)
    try:
        write(str(path), "größe\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == "größe\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == ["report.txt"]


def test_a_link_of_this_user_is_followed_and_stays(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write(str(tmp_path / "link"), "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_dash_is_standard_output(capsys):
    check_writable("-")
    write("-", "text\n")
    assert capsys.readouterr().out == "text\n"


def test_an_ascii_log_gets_escapes_and_no_error(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    write("-", "4× \udcff\n")
    assert raw.getvalue() == b"4\\xd7 \\udcff\n"


def test_a_device_and_a_pipe_are_written_to():
    check_writable("/dev/null")
    write("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    reader, writer = os.pipe()
    with os.fdopen(reader) as file:
        check_writable(f"/dev/fd/{writer}")
        write(f"/dev/fd/{writer}", "text")
        os.close(writer)
        assert file.read() == "text"


def test_a_named_pipe_without_a_reader_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=r"cannot write .*fifo: No such device"):
        write(str(tmp_path / "fifo"), "text")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing/report.txt", "No such file or directory"),
        ("file/report.txt", "Not a directory"),
        ("folder", "Is a directory"),
        ("a\0b", "null"),
        ("x" * 300, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_written_is_said_before_and_after(tmp_path, path, reason):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    for attempt in (lambda name: check_writable(name), lambda name: write(name, "text")):
        with pytest.raises(UsageError, match="cannot write") as caught:
            attempt(f"{tmp_path}/{path}")
        assert path in str(caught.value)
        assert reason in str(caught.value)
    assert names(tmp_path) == before
    with pytest.raises(UsageError, match="the name is empty"):
        check_writable("")


def test_a_failed_move_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "report.txt").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(UsageError, match=r"report\.txt: No space left on device"):
        write(str(tmp_path / "report.txt"), "new")
    assert names(tmp_path) == ["report.txt"]
    assert (tmp_path / "report.txt").read_text() == "old"


def test_looking_changes_nothing(tmp_path):
    (tmp_path / "report.txt").write_text("old")
    before = (tmp_path / "report.txt").stat().st_mtime_ns
    check_writable(str(tmp_path / "report.txt"))
    check_writable(str(tmp_path / "other.txt"))
    assert names(tmp_path) == ["report.txt"]
    assert (tmp_path / "report.txt").read_text() == "old"
    assert (tmp_path / "report.txt").stat().st_mtime_ns == before


def test_a_strangers_file_in_a_shared_folder_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "report.txt").touch()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="only its owner may replace it"):
        check_writable(str(tmp_path / "report.txt"))
