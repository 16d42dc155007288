"""A rank's own record on disk."""

import os
from pathlib import Path

import pytest
from msgspec import structs
from seen import arrival_of

from ddpdiag.codec import encode_line, read_recording
from ddpdiag.errors import UsageError
from ddpdiag.model import End, Header, Outcome, RunOptions, Status
from ddpdiag.runtime.record import Record, SharedRecord, is_locked, make_run_folder, remove_scratch

HEADER = Header(run_id="r", world_size=1, launcher="hand", options=RunOptions(), created="", version="0")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_nothing_stays_of_a_run_that_was_acknowledged(temporary: Path) -> None:
    folder = make_run_folder("a run/../id")
    record = Record(folder, 0, HEADER)
    (record.scratch / "fxgraph").mkdir()
    (record.scratch / "fxgraph" / "file").write_text("torch's")
    record.write(End(seconds=1.0))
    assert folder.parent == temporary
    assert record.path.stat().st_mode & 0o777 == 0o600
    record.remove()
    assert list(temporary.iterdir()) == []


def test_a_kept_record_stays_and_the_next_run_of_the_same_id_does_not_overwrite_it(temporary: Path) -> None:
    first = Record(make_run_folder("r"), 1, HEADER)
    first.keep()
    second = Record(make_run_folder("r"), 1, HEADER)
    second.write(End(seconds=2.0))
    assert read_recording([second.path]).end == End(seconds=2.0)
    (old,) = first.folder.glob("old-*-rank-1.jsonl")
    assert read_recording([old]).end is None
    second.remove()
    assert [path.name for path in first.folder.iterdir()] == [old.name]


@pytest.mark.parametrize(
    ("nonces", "is_lost"), [({2: "abcd", 3: "ef01"}, True), ({2: "0123"}, False)], ids=["this run", "another run"]
)
def test_the_files_of_ranks_that_cannot_tidy_up_are_removed_if_of_this_run(temporary: Path, nonces, is_lost) -> None:
    lost, living = (Record(make_run_folder("r"), rank, HEADER) for rank in (2, 0))
    lost.write(structs.replace(arrival_of(2, 4), nonce="abcd"))
    os.close(lost._descriptor)  # as the kernel does
    living.remove_files_of(nonces)
    living.remove()
    assert (lost.path.exists(), lost.scratch.exists()) == (not is_lost, not is_lost)
    assert bool(list(temporary.iterdir())) is not is_lost


def test_what_a_killed_rank_left_goes_unless_it_had_seen_something(temporary: Path) -> None:
    killed, saw, living, own = (Record(make_run_folder("r"), rank, HEADER) for rank in (0, 1, 2, 3))
    saw.write(Outcome(trial=1, code="COL001", rank=1, status=Status.DONE))
    for record in (killed, saw):
        os.close(record._descriptor)  # as the kernel does
    own.remove_files_of_killed()
    assert not killed.path.exists()
    assert not killed.scratch.exists()
    assert all(record.path.exists() for record in (saw, living, own))


def test_two_living_runs_with_one_id_do_not_share_a_record(temporary: Path) -> None:
    first, second = Record(make_run_folder("r"), 1, HEADER), Record(make_run_folder("r"), 1, HEADER)
    second.write(End(seconds=2.0))
    assert first.path != second.path
    assert second.folder.name.startswith("ddpdiag-r-")
    second.remove()
    first.remove()
    assert list(temporary.iterdir()) == []


def test_a_record_is_held_as_long_as_its_process_lives(temporary: Path) -> None:
    record = Record(make_run_folder("r"), 1, HEADER)
    assert is_locked(record.path)
    record.keep()
    assert not is_locked(record.path)
    assert not is_locked(record.folder / "rank-7.jsonl")


def test_a_folder_of_somebody_else_is_not_used(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / "ddpdiag-r").symlink_to(temporary / "elsewhere")
    assert make_run_folder("r").name.startswith("ddpdiag-r-")


def test_a_disk_that_takes_nothing_loses_the_copy_and_not_the_run(temporary: Path) -> None:
    folder = make_run_folder("r")
    folder.rmdir()
    folder.write_text("a file where the folder should be")
    record = Record(folder, 0, HEADER)
    record.write(End(seconds=1.0))
    record.remove()
    remove_scratch(folder, 7)


def test_no_temporary_folder_at_all_is_explained(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "missing"))
    with pytest.raises(UsageError, match="set TMPDIR"):
        make_run_folder("r")


def shared_record(folder: Path, file: str, nonce: str = "abcd") -> SharedRecord:
    record = SharedRecord(str(folder), "r", file)
    record.write(HEADER)
    if nonce:
        record.open(nonce)
    return record


def test_lines_of_before_the_folder_had_a_name_are_written_first(tmp_path: Path) -> None:
    record = shared_record(tmp_path, "rank-2.jsonl")
    record.write(arrival_of(2, 4))
    folder = record.keep()
    assert folder == tmp_path / "ddpdiag-r-abcd"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [encode_line(HEADER) + encode_line(arrival_of(2, 4))] == [p.read_bytes() for p in folder.iterdir()]


@pytest.mark.parametrize(("folder", "nonce"), [(".", ""), ("gone", "abcd")], ids=["no name", "no such directory"])
def test_a_shared_folder_without_name_or_place_costs_the_copy_and_not_the_run(tmp_path: Path, folder, nonce) -> None:
    record = shared_record(tmp_path / folder, "rank-2.jsonl", nonce)
    assert record.keep() is None
    record.remove(all_files=True)
    assert list(tmp_path.iterdir()) == []


def test_rank_0_removes_what_lost_ranks_wrote_and_late_lines_leave_nothing(tmp_path: Path) -> None:
    lost, rank_0 = (shared_record(tmp_path, name) for name in ("rank-2.jsonl", "run.jsonl"))
    assert lost.keep()
    rank_0.remove(all_files=True)
    lost.write(arrival_of(2, 4))
    assert lost.keep()
    assert list(tmp_path.iterdir()) == []
