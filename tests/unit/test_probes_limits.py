"""Limits of this very process."""

import os

from ddpdiag.probes.host.limits import affinity, rlimits, shared_memory, user_processes


def test_limits_are_numbers_or_unlimited():
    seen = rlimits()
    assert seen is not None
    assert seen.nofile is None or seen.nofile > 0


def test_this_process_may_run_somewhere():
    assert affinity()


def test_the_probe_leaves_no_file_behind_and_says_why_it_fails(tmp_path):
    seen = shared_memory(tmp_path, probe_bytes=4096)
    assert seen is not None
    assert seen.error is None
    assert seen.size_bytes >= seen.free_bytes > 0
    seen = shared_memory(tmp_path, probe_bytes=1 << 60)
    assert seen is not None
    assert seen.error
    assert os.listdir(tmp_path) == []
    assert shared_memory(tmp_path / "shm") is None


def test_only_processes_of_this_user_that_still_exist_count(tmp_path):
    for name in ("17", "self"):
        (tmp_path / name).mkdir()
    (tmp_path / "18").symlink_to(tmp_path / "gone")
    assert user_processes(tmp_path) == 1
    assert user_processes(tmp_path / "nowhere") is None
