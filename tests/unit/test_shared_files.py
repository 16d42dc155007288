"""Files that hosts share, in a directory of this one: threads stand for hosts."""

import threading
import time
from pathlib import Path

from ddpdiag.probes.host import shared_files

# As torch 2.13 writes it: `FileStore(path, 2).set("a", "b")`.
STORE = b"\t\0\0\0refcount/\1\0\0\x001\2\0\0\0/a\1\0\0\0b"


def looked(directories, tokens=None, seconds=5.0):
    """What hosts see that each write a file in their directory, and look for all the others'."""
    tokens = tokens or {rank: f"token-{rank}" for rank in range(len(directories))}
    views = {}

    def be(rank):
        own = shared_files.token_path(directories[rank], tokens[rank])
        views[rank] = shared_files.find_files(directories[rank], rank, tokens, seconds)
        shared_files.remove_files((own, shared_files.done_path(own)))

    for rank, token in tokens.items():
        if token:
            shared_files.write_new(shared_files.token_path(directories[rank], token), token)
    with shared_files.hold_lock(shared_files.token_path(directories[0], tokens[0])):
        threads = [threading.Thread(target=be, args=(rank,)) for rank, token in tokens.items() if token]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return views


def test_hosts_see_each_others_files_at_once_and_leave_nothing(tmp_path):
    views = looked([tmp_path] * 3)
    assert [views[rank].missing_ranks for rank in range(3)] == [(), (), ()]
    assert [views[rank].lock_is_local for rank in range(3)] == [None, False, False]
    assert list(tmp_path.iterdir()) == []


def test_a_host_with_a_directory_of_its_own_sees_no_other(tmp_path):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    views = looked([shared, other, shared], seconds=0.1)
    assert [views[rank].missing_ranks for rank in range(3)] == [(1,), (0, 2), (1,)]
    assert [*shared.iterdir(), *other.iterdir()] == []


def test_who_wrote_nothing_is_not_looked_for(tmp_path):
    assert looked([tmp_path] * 3, {0: "a", 1: "", 2: "c"})[2].missing_ranks == ()


def test_a_host_alone_has_nobody_to_look_for(tmp_path):
    assert looked([tmp_path])[0] == shared_files.HostFiles()


def test_a_lock_that_is_held_is_told_from_one_that_fails(tmp_path):
    own = tmp_path / "own"
    assert shared_files.write_new(own, "word") is None
    assert shared_files.try_lock(own) is None
    with shared_files.hold_lock(own):
        assert shared_files.try_lock(own) == "EAGAIN"
    assert shared_files.try_lock(tmp_path / "none") == "ENOENT"


def test_a_file_that_cannot_be_written_says_why(tmp_path):
    assert shared_files.write_new(tmp_path / "none" / "own", "word") == "ENOENT"
    assert shared_files.write_new(Path("/proc/own"), "word") in ("ENOENT", "EACCES", "EPERM")
    (tmp_path / "file").touch()
    assert shared_files.write_new(tmp_path / "file" / "own", "word") == "ENOTDIR"


def test_a_file_that_is_gone_can_be_waited_for(tmp_path):
    assert set(shared_files.wait_for_contents({tmp_path / "none": None}, time.monotonic())) == {tmp_path / "none"}


def test_stores_of_torch_are_found_and_nothing_else(tmp_path):
    (tmp_path / "store").write_bytes(STORE)
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_bytes(b"refcount/ is a key")
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "folder").mkdir()
    (found,) = shared_files.find_store_files(tmp_path)
    assert (Path(found.path), found.bytes) == (tmp_path / "store", len(STORE))
    assert 0 <= found.age_seconds < 60


def test_a_directory_that_cannot_be_listed_holds_no_stores(tmp_path):
    assert shared_files.find_store_files(tmp_path / "none") == ()
