"""The test bed itself: a Slurm that does what Slurm does, and of which nothing stays."""

import os
from pathlib import Path

import pytest
from slurm_cluster import Cluster, folder

pytestmark = pytest.mark.slurm


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
