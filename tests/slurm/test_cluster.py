"""The test bed itself: a Slurm that does what Slurm does, and of which nothing stays."""

import os
from pathlib import Path

import pytest
from slurm_cluster import Cluster, folder

pytestmark = pytest.mark.slurm


def test_jobs_run_on_all_nodes_and_their_exit_codes_come_back(cluster):
    four = cluster(4)
    done = four.srun("-N4", "-n4", "sh", "-c", "echo $SLURM_PROCID $(hostname) $(getent hosts h0 | wc -l)")
    assert sorted(done.stdout.splitlines()) == [f"{rank} h{rank} 1" for rank in range(4)], done.stderr
    ended = four.wait(four.sbatch("echo on $(hostname); touch here; exit 3", "-N2", "-n2"))
    assert (ended.state, ended.exit_code, ended.output) == ("FAILED", 3, "on h0\n")
    assert (four.shared / "here").exists()


def test_lost_nodes_go_down_and_come_back(cluster):
    four = cluster(4)
    four.kill_slurmd("h1")
    four.cut_off("h2")
    four.power_off("h3")
    for node in ("h1", "h2", "h3"):
        four.miss(node)
    states = four.call("sinfo", "-h", "-N", "-o", "%t").split()
    assert [state.strip("*") for state in states] == ["idle", "down", "down", "down"]
    four.restore()
    assert four.srun("-N4", "-n4", "true").returncode == 0


def _marks(*folders: Path) -> list[str]:
    """What of these clusters anybody could see; not what is of other ones, which come and go beside these tests."""
    places = ("/tmp", "/run", "/sys/fs/cgroup", *Path("/sys/fs/cgroup").glob("*/"))
    entries = [str(entry) for place in places for entry in Path(place).glob("*")]
    devices = [name for name in os.listdir("/sys/class/net") if name.startswith(("bridge", "port"))]
    return [*devices, *(entry for entry in entries if any(folder.name in entry for folder in folders))]


def _daemons(path: Path):
    return [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if str(path).encode() in _read(entry)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has just ended


def test_two_clusters_do_not_meet_and_nothing_stays():
    hosts = Path("/etc/hosts").read_text()
    with folder() as own, folder() as other, Cluster(1, own) as one, Cluster(1, other) as two:
        assert _daemons(own)
        assert str(own) in _marks(own)
        jobs = [cluster.sbatch("sleep 1000") for cluster in (one, two)]
        one.call("scancel", jobs[0])
        assert one.wait(jobs[0]).state == "CANCELLED"
        assert two.state(jobs[1])["JobState"] in ("PENDING", "RUNNING")
    assert not _daemons(own)
    assert not own.exists()
    assert _marks(own, other) == []
    assert Path("/etc/hosts").read_text() == hosts
