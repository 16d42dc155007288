"""What ranks that do not reach rank 0 leave in the shared folder."""

import os
from pathlib import Path

import pytest
from seen import arrival_of

from ddpdiag.model import Event, EventKind
from ddpdiag.runtime.record.failover import with_notes
from ddpdiag.runtime.record.shared_folder import Note, NoteReader, NoteWriter, SharedFolder, read_notes

NAME = "ddpdiag-r"
ABSENT = Event(kind=EventKind.ABSENT, rank=2, seconds=15.0)


def test_rank_0_reads_what_an_absent_rank_wrote_and_the_note_goes_with_its_writer(tmp_path: Path) -> None:
    reader = NoteReader(str(tmp_path), NAME, world_size=4, wait_seconds=5.0)
    note = NoteWriter(str(tmp_path), NAME, arrival_of(2, 4))
    note.write("no answer")
    while not (notes := reader.found):
        pass
    note.remove()
    reader.stop()
    assert notes[2] == Note(2, 4, "n1", "no answer")
    (event,) = with_notes([ABSENT], notes)
    assert isinstance(event, Event)
    assert (event.node, event.detail) == ("n1", "no answer")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_said_of_who_wrote_nothing() -> None:
    assert with_notes([ABSENT], {3: Note(3, 4, "n1", "no answer")}) == [ABSENT]


def test_old_and_huge_files_and_noise_are_no_notes(tmp_path: Path) -> None:
    (tmp_path / "rank-1-x").write_text('{"rank":1,"world_size":4,"node":"n0","sentence":"old"}')
    os.utime(tmp_path / "rank-1-x", (1000, 1000))
    (tmp_path / "rank-2-x").write_text('{"rank":2,"world_size":4,"node":"n0","sentence":"' + "x" * 5000 + '"}')
    (tmp_path / "rank-3-x").write_bytes(b"\xff{")
    assert list(read_notes(SharedFolder(tmp_path), 2000.0)) == []


def test_a_note_is_not_written_through_a_link_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{NAME}-notes").symlink_to(tmp_path / "elsewhere")
    note = NoteWriter(str(tmp_path), NAME, arrival_of(2, 4))
    note.write("no answer")
    note.remove()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_note_can_be_read_by_its_user_only(tmp_path: Path) -> None:
    NoteWriter(str(tmp_path), NAME, arrival_of(2, 4)).write("no answer")
    while not (found := [path for path in tmp_path.glob("*/rank-2-*") if path.stat().st_size]):
        pass
    assert [path.stat().st_mode & 0o777 for path in (*found, found[0].parent)] == [0o600, 0o700]


def test_a_folder_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "rank-1-x").write_text('{"rank":1,"world_size":4,"node":"n0","sentence":"hello"}')
    assert [note.sentence for note in read_notes(SharedFolder(real), 0.0)] == ["hello"]
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(NotADirectoryError):
        list(read_notes(SharedFolder(tmp_path / "link"), 0.0))
