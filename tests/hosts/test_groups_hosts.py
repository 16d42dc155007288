"""ddpdiag.preflight(groups=...) in a training on four hosts: a cable that turns slow or is cut between two checks."""

import re
import time

import pytest
from launch import Launched
from network import Host

pytestmark = [pytest.mark.hosts, pytest.mark.deep]

TRAIN = """\
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import ddpdiag

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
monitor = ddpdiag.preflight(groups={"dp": dist.group.WORLD}, every=1, sizes=1 << 20, join_timeout=30, budget=20)
(folder / f"checked-{rank}").touch()
while not (folder / "go on").exists():
    time.sleep(0.05)
try:
    print(f"rank {rank} {monitor.step()}", flush=True)
except ddpdiag.UnfitError as error:
    print(f"rank {rank} raised {error}", flush=True)
    os._exit(1)
"""


def slow(host: Host) -> None:
    host.slow("20mbit")
    host.slow("20mbit", incoming=True)


@pytest.mark.parametrize(
    ("harm", "text", "own_text"),
    [
        (slow, "rank 2 on h2 .*slow", "rank 2 on h2 .*slow"),
        (Host.cut, "rank 2 on h2 did not reach the check of the groups", "the job's store, .* does not answer"),
    ],
    ids=["slow", "cut"],
)
def test_a_cable_that_fails_in_mid_training_is_named(hosts, tmp_path, harm, text, own_text):
    network, run = hosts(4), Launched(tmp_path / "run")
    (tmp_path / "train.py").write_text(TRAIN)
    try:
        for host in network:
            place = {"RANK": host.index, "WORLD_SIZE": 4, "MASTER_ADDR": "h0", "MASTER_PORT": 29500}
            variables = {name: str(value) for name, value in place.items()}
            run.start(host.name, host, [str(tmp_path / "train.py"), str(tmp_path)], variables)
        end = time.monotonic() + 120
        while len([*tmp_path.glob("checked-*")]) < 4:
            assert time.monotonic() < end, run.told()
            time.sleep(0.1)
        harm(network[2])
        (tmp_path / "go on").touch()
        assert run.is_over(120), run.told()
        for rank in range(4):
            assert re.search(rf"rank {rank} raised UNFIT: .*{own_text if rank == 2 else text}", run.told()), run.told()
    finally:
        run.destroy()
