"""Prolog and TaskProlog of the recipes, run by slurmd."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster

from recipes import changed

pytestmark = pytest.mark.slurm


@pytest.fixture
def configured(cluster, tmp_path) -> Iterator[Callable[..., Cluster]]:
    """configured(TaskProlog=path): a cluster with these lines in its slurm.conf, until the test ends."""
    four = cluster(4)
    before = four.conf.read_text()

    def configure(**lines: Path) -> Cluster:
        four.conf.write_text(before + "".join(f"{name}={path}\n" for name, path in lines.items()))
        four.call("scontrol", "reconfigure")
        for name, path in lines.items():
            until(lambda name=name, path=path: f"{path}" in four.call("scontrol", "show", "config"), f"no {name}")
        return four

    yield configure
    four.conf.write_text(before)
    four.call("scontrol", "reconfigure")


def until(true: Callable[[], object], otherwise: str, seconds: float = 60.0) -> None:
    """Wait for what a daemon does in its own time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.1)


def drained(cluster: Cluster) -> set[str]:
    """Nodes that take no more jobs."""
    states = (line.split() for line in cluster.call("sinfo", "-h", "-N", "-o", "%N %t").splitlines())
    return {name for name, state in states if state.startswith(("drain", "drng"))}


def test_a_prolog_drains_the_unfit_node_and_no_other_one(configured, tmp_path):
    # A node of which eight GPUs are expected.
    gpus = '(--budget 10 $([ "$SLURMD_NODENAME" != h1 ] || echo --expect-gpus 8))'
    four = configured(Prolog=changed("slurm-prolog.sh", tmp_path, ("(--budget 10)", gpus)))
    assert four.srun("-w", "h0", "hostname").stdout == "h0\n"
    spared = four.srun("-w", "h1", "--comment=DDPDIAG_SKIP=1", "hostname")
    assert spared.stdout == "h1\n", spared.stderr
    assert drained(four) == set()
    refused = four.srun("-w", "h1", "--immediate=5", "hostname")
    assert refused.returncode != 0
    assert "h1" not in refused.stdout
    until(lambda: drained(four) == {"h1"}, "h1 is not drained")
    assert four.srun("-w", "h0", "hostname").stdout == "h0\n"


def test_a_task_prolog_speaks_in_the_output_of_the_job(configured, tmp_path):
    four = configured(TaskProlog=changed("slurm-task-prolog.sh", tmp_path))
    done = four.srun("-N2", "-n4", "sh", "-c", "echo it is ${DDPDIAG_HOST:-not told}")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    # Once on each node; the sentence is folded at 80 columns.
    assert sorted(line[:13] for line in lines if line.startswith("FIT:")) == ["FIT: host h0:", "FIT: host h1:"]
    assert lines.count("it is fit") == 2
    assert lines.count("it is not told") == 2
    quiet = four.srun("-N2", "-n2", "true", DDPDIAG_SKIP="1")
    assert quiet.stdout == ""
