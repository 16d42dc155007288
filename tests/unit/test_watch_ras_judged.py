"""What a look concludes from NCCL's RAS."""

import pytest
from ras_stand_in import communicator, rank, status
from test_watch_judged import COMPUTES, SAVES, WAITS, seen, stalled

from ddpdiag.evidence.ras import parse_answer
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.watch.judge import judge
from ddpdiag.watch.look import RasEvidence


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
