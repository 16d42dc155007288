"""Limits in fake control groups of both versions."""

from pathlib import Path

from ddpdiag.probes.host.limits import Cgroup, LimitUse, cgroup


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)


def roots(tmp_path: Path, groups: str) -> tuple[Path, Path]:
    write(tmp_path / "proc" / "self", cgroup=groups)
    return tmp_path / "proc", tmp_path / "sys"


def test_version_2_counts_the_tightest_level(tmp_path):
    proc, sys = roots(tmp_path, "0::/job/step\n")
    mount = sys / "fs" / "cgroup"
    write(mount / "job", cpu__max="max 100000", memory__max="1000", memory__current="900", pids__max="50")
    write(mount / "job", pids__current="20")
    write(mount / "job" / "step", cpu__max="150000 100000", memory__max="max", memory__current="5")
    write(mount / "job" / "step", memory__events="low 0\noom 1\noom_kill 2\n", pids__max="max", pids__current="3")
    write(mount / "job", memory__stat="anon 600\ninactive_file 300\n")
    assert cgroup(proc, sys) == Cgroup(cpus=1.5, memory=LimitUse(1000, 600), pids=LimitUse(50, 20), oom_kills=2)


def test_version_1_reads_each_controllers_own_tree(tmp_path):
    proc, sys = roots(tmp_path, "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/\n")
    mount = sys / "fs" / "cgroup"
    write(mount / "memory" / "docker" / "x", memory__limit_in_bytes="4096", memory__usage_in_bytes="96")
    write(mount / "memory" / "docker" / "x", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    write(mount / "cpu" / "docker" / "x", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write(mount / "pids", pids__max="10", pids__current="12")
    seen = cgroup(proc, sys)
    assert seen == Cgroup(cpus=2.0, memory=LimitUse(4096, 96), pids=LimitUse(10, 12), oom_kills=1)
    assert seen.pids.unused == 0


def test_a_level_that_a_container_does_not_show_is_left_out(tmp_path):
    proc, sys = roots(tmp_path, "4:memory:/docker/x\n")
    write(sys / "fs" / "cgroup" / "memory", memory__limit_in_bytes="4096", memory__usage_in_bytes="96")
    assert cgroup(proc, sys).memory == LimitUse(4096, 96)


def test_no_limit_and_nothing_readable_are_none_in_both_versions(tmp_path):
    assert cgroup(tmp_path, tmp_path) == Cgroup()
    proc, sys = roots(tmp_path, "4:memory:/\n3:cpu:/\n0::/\n")
    mount = sys / "fs" / "cgroup"
    write(mount / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="96")
    write(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cgroup(proc, sys) == Cgroup()
