"""What a look reads from NCCL's RAS, and what it concludes."""

import os
import time

import pytest
from ras_stand_in import Server, answers, communicator, rank, status
from test_watch_judged import COMPUTES, SAVES, WAITS, seen, stalled

from ddpdiag.evidence.ras import parse_answer
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.watch.judge import judge
from ddpdiag.watch.look import RasEvidence
from ddpdiag.watch.processes import Process
from ddpdiag.watch.ras import RasReader


def evidence(*counts: int) -> RasEvidence:
    """Two equal answers: each rank has launched so many all-reduces."""
    ranks = (rank(number, AllReduce=count) for number, count in enumerate(counts))
    answer = parse_answer(b"SERVER PROTOCOL 2\nOK\n" + status(communicator(*ranks)))
    assert answer is not None
    return RasEvidence((answer, answer), 60.0)


def trains(rank: int, cores: float = 1.0):
    return seen(rank, COMPUTES, "R", cores=cores, holds_gpu=True)


def gpus(*shares: float | None) -> tuple[GpuUse, ...]:
    return tuple(GpuUse(index=rank, busy_share=share, pids=(100 + rank,)) for rank, share in enumerate(shares))


LOOKS = {
    "behind, and its GPU is idle": ([trains(0), trains(1)], {"gpus": gpus(1.0, 0.0)}, (9, 8), "ras.behind", (1,)),
    "behind, and it uses no core": ([trains(0), trains(1, 0.0)], {"gpus": gpus(1.0, 1.0)}, (9, 8), "ras.behind", (1,)),
    "behind, but its GPU is busy": ([trains(0), trains(1)], {"gpus": gpus(1.0, 1.0)}, (9, 8), "ras.frozen", ()),
    "behind, but its GPU is unknown": ([trains(0), trains(1)], {}, (9, 8), "ras.frozen", ()),
    "behind, and saves a model": (
        [trains(0), seen(1, SAVES, holds_gpu=True, holds_gil=True)],
        {"gpus": gpus(1.0, 1.0)},
        (9, 8),
        "ras.behind",
        (1,),
    ),
    "behind on another host": ([seen(0, WAITS), seen(1, WAITS)], {"world_size": 3}, (9, 9, 8), "ras.behind", (2,)),
    "all launched the same, and wait": (
        [seen(0, WAITS), seen(1, WAITS)],
        {"world_size": 3},
        (9, 9, 9),
        "ras.frozen",
        (),
    ),
    "all launched the same, and may compute": ([trains(0), trains(1)], {"gpus": gpus(1.0, 1.0)}, (9, 9), "", ()),
    "all launched the same, twice at one place": (
        [trains(0), trains(1)],
        {"gpus": gpus(1.0, 1.0), "all_unmoved": True},
        (9, 9),
        "ras.frozen",
        (),
    ),
    "a stopped rank is named first": ([seen(0, WAITS, "T"), seen(1, WAITS)], {}, (9, 8), "watch.stopped", (0,)),
}


@pytest.mark.parametrize(("states", "more", "counts", "code", "ranks"), LOOKS.values(), ids=LOOKS)
def test_ranks_that_wait_for_their_gpu_are_not_named(states, more, counts, code, ranks):
    lead = judge(stalled(*states, ras=evidence(*counts), **more))[0]
    assert lead.ranks == ranks
    assert lead.code == code or (not code and not lead.code.startswith("ras."))


def read(reader: RasReader, **environ: str) -> RasEvidence:
    process = Process(os.getpid(), 1, "python", "S", 0, environ=environ)
    return reader.read([process], 1, time.monotonic() + 5)


def test_counts_are_compared_with_the_oldest_equal_ones():
    counts = [5, 5, 5, 5, 9, 9]
    pid = os.getpid()

    def answer(question: bytes):
        return answers(status(communicator(rank(0, pid=pid, AllReduce=counts.pop(0)))))(question)

    with Server(answer) as server:
        looks = [read(reader, NCCL_RAS_ADDR=f"localhost:{server.port}") for reader in [RasReader(0.0)] * 3]
    seen_counts = [[each.communicators[0].ranks[0].launched["AllReduce"] for each in look.snapshots] for look in looks]
    assert seen_counts == [[5, 5], [5, 5], [9, 9]]
    assert looks[1].seconds > looks[0].seconds


def test_ranks_without_nccl_are_not_asked_for():
    assert read(RasReader(0.0)) == RasEvidence()
    disabled = read(RasReader(0.0), NCCL_RAS_ADDR="localhost:1", NCCL_RAS_ENABLE="0")
    assert disabled.why_missing == "NCCL_RAS_ENABLE is not 1"
