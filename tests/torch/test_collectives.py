"""Sums that are known, and who spoils them: ranks that meet over gloo, one of which tampers with what it sends."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ddpdiag.checks.blame import missing_backend_errors
from ddpdiag.errors import AbsentBackend
from ddpdiag.model import Outcome, Status
from ddpdiag.workloads.collectives import RANK_PERIOD, expected_sum, pattern
from ddpdiag.workloads.group import process_group

CPU = torch.device("cpu")
RANKS = 3
# "none": nothing is wrong. "more": what rank 1 sends goes out larger.
WAYS = ("none", "more")
# Imports torch once, and forks the ranks of each way.
SCRIPT = """
import json, os, sys, traceback
from pathlib import Path
import torch, torch.distributed as dist
from ddpdiag.workloads import collectives

folder, ranks, *ways = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
all_reduce, broadcast, cpu = dist.all_reduce, dist.broadcast, torch.device("cpu")

class Context:
    group = tuple(range(ranks))
    trial = type("Trial", (), {"number": 1})
    step = add_timing = staticmethod(lambda *_: None)

def tamper(rank, way):
    def tampered_all_reduce(tensor, **options):
        if rank == 1 and tensor.is_floating_point():
            tensor.add_(1)
        return all_reduce(tensor, **options)

    def tampered_broadcast(tensor, src):
        # The copy that goes out is spoilt, and the rank's own stays as it is.
        return broadcast(tensor + 1 if src == rank == 1 else tensor, src=src)

    dist.all_reduce, dist.broadcast = tampered_all_reduce, tampered_broadcast

def be(rank, way):
    if way != "none":
        tamper(rank, way)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{way}", rank=rank, world_size=ranks)
    collectives.connect(Context, cpu)
    checked = collectives.check_all_reduce(Context, 4096, cpu)
    answer = {"wrong": checked.wrong}
    answer["anywhere"] = collectives.is_true_on_any_rank(Context, checked.wrong > 0)
    if answer["anywhere"]:
        answer["senders"], answer["wrong_from"] = collectives.check_broadcasts(Context, 4096, cpu, 64)
    else:
        answer["seconds"] = collectives.time_all_reduce(Context, 4096, cpu, (1, rank + 2))
    (folder / f"{way}-{rank}").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()

for way in ways:
    for rank in range(ranks):
        if os.fork() == 0:
            try:
                be(rank, way)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each rank found, by way."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(RANKS), *WAYS]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=True)
    return {way: [json.loads((folder / f"{way}-{rank}").read_text()) for rank in range(RANKS)] for way in WAYS}


def test_right_sums_are_timed_as_often_as_the_slowest_can_afford(answers):
    assert [own["wrong"] for own in answers["none"]] == [0] * RANKS
    assert [len(own["seconds"]) for own in answers["none"]] == [2] * RANKS


def test_the_rank_whose_part_goes_out_spoilt_is_found(answers):
    found = answers["more"]
    assert all(own["wrong"] == 1024 and own["anywhere"] and own["senders"] == RANKS for own in found)
    assert [own["wrong_from"] for own in found] == [[1], [], [1]]


@pytest.mark.parametrize("ranks", [2, RANK_PERIOD + 3])
def test_the_sum_of_all_parts_is_what_is_expected(ranks):
    parts = torch.stack([pattern(20, rank, CPU) for rank in range(ranks)])
    assert torch.equal(parts.sum(0), expected_sum(20, ranks, CPU))


def test_a_backend_that_torch_does_not_know_is_told_apart_from_one_that_fails():
    with pytest.raises(AbsentBackend, match=r"\bglo,.*\bgloo\b") as raised, process_group(None, "glo"):
        pass
    # As a worker writes it.
    error = f"{type(raised.value).__name__}: {raised.value}"
    outcome = Outcome(trial=1, code="COL001", rank=3, status=Status.RAISED, error=error)
    assert missing_backend_errors([outcome]) == {3: str(raised.value)}
