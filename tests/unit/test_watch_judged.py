"""Who is named, of ranks that stand like this."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.codec import decode, encode
from ddpdiag.judgement.watch import is_start, judged
from ddpdiag.judgement.watch_apart import stands_as
from ddpdiag.model import Collective, ProcessState
from ddpdiag.model.watch import GpuUse, Helper, Judged, RankSeen, Stall
from ddpdiag.render.watch import render

WAITS = ("all_reduce (distributed_c10d.py:3252)", "wrapper (c10d_logger.py:83)", "<module> (train.py:25)")
BARRIER = ("barrier (distributed_c10d.py:4900)", "<module> (train.py:30)")
COMPUTES = ("spin (train.py:7)", "<module> (train.py:14)")
SAVES = ("save (serialization.py:90)", "<module> (train.py:40)")
BACKWARD = ("_engine_run_backward (graph.py:841)", "backward (__init__.py:353)", "<module> (train.py:20)")
LOADS = ("select (selectors.py:415)", "poll (connection.py:257)", "_try_get_data (dataloader.py:1131)")
IMPORTS = ("<module> (serialization.py:9)", "_find_and_load (<frozen importlib._bootstrap>:1176)")


def seen(rank: int, stack=(), state="S", *, cores=0.0, **more) -> RankSeen:
    facts = {"holds_gpu": False, "no_stack": "" if stack else "not installed"} | more
    process = ProcessState(pid=100 + rank, state=state, stack=stack, wchan=facts.pop("wchan", None))
    return RankSeen(rank=rank, pid=100 + rank, process=process, core_share=cores, **facts)


def stalled(*ranks: RankSeen, **more) -> Stall:
    facts = {"host": "n0", "unix_seconds": 0.0, "silent_seconds": 9.0, "stall_seconds": 8.0, "command": "torchrun"}
    return Stall(**facts | {"ranks": ranks, "world_size": len(ranks)} | more)


def named(*ranks: RankSeen, **more) -> tuple[int, ...]:
    return judged(stalled(*ranks, **more)).named


def posted(seq: int, name: str = "nccl:all_reduce", elements: int = 4) -> tuple[Collective, ...]:
    return tuple(Collective(seq=n, name=name, elements=elements, dtype="Float", group="0") for n in range(1, seq + 1))


def test_a_stopped_rank_comes_before_one_that_is_elsewhere():
    assert named(seen(0, WAITS), seen(1, COMPUTES, "R"), seen(2, WAITS, "T")) == (2,)


def test_of_two_the_one_that_is_not_in_the_collective_is_named():
    assert named(seen(0, WAITS), seen(1, COMPUTES, "R", cores=1.0)) == (1,)


def test_who_waits_alone_for_most_is_not_the_odd_one():
    assert named(seen(0, BARRIER), *(seen(rank, SAVES) for rank in range(1, 4))) == (1, 2, 3)


def test_all_in_one_collective_name_nobody():
    verdict = judged(stalled(seen(0, WAITS), seen(1, WAITS)))
    assert (verdict.named, verdict.title) == ((), "all ranks wait in all_reduce")


def test_all_of_this_host_in_one_collective_point_at_the_others():
    verdict = judged(stalled(seen(0, WAITS), seen(1, WAITS), world_size=4))
    assert verdict.named == ()
    assert "all ranks of this host wait in all_reduce" in verdict.title
    assert "other hosts" in verdict.remedy


def test_different_collectives_of_two_name_nobody_and_of_three_the_odd_one():
    assert named(seen(0, WAITS), seen(1, BARRIER)) == ()
    assert named(seen(0, WAITS), seen(1, BARRIER), seen(2, WAITS)) == (1,)


def test_a_sleeping_backward_waits_and_a_busy_one_computes():
    assert named(seen(0, BACKWARD, cores=0.0), seen(1, SAVES)) == (1,)
    assert named(seen(0, WAITS), seen(1, BACKWARD, "R", cores=1.0)) == (1,)


def test_stuck_in_the_kernel_is_named_with_its_place():
    verdict = judged(stalled(seen(0, WAITS), seen(1, SAVES, "D", wchan="nfs_wait_on_request")))
    assert verdict.named == (1,)
    assert "nfs_wait_on_request" in verdict.message


def test_a_dead_rank_is_named_whether_its_launcher_buried_it_or_not():
    assert named(seen(0, WAITS), seen(1, state="Z")) == (1,)
    assert named(seen(0, WAITS), RankSeen(rank=1, pid=101)) == (1,)


@pytest.mark.parametrize("state", ["T", "D", "Z"])
def test_a_sick_worker_of_a_data_loader_is_told(state):
    worker = Helper(pid=7, name="python", state=state)
    verdict = judged(stalled(seen(0, WAITS), seen(1, LOADS, helpers=(worker,))))
    assert verdict.named == (1,)
    assert "pid 7" in verdict.message


def test_who_waits_for_data_is_named_even_with_healthy_workers():
    worker = Helper(pid=7, name="python", state="S")
    assert named(seen(0, WAITS), seen(1, LOADS, helpers=(worker,))) == (1,)


def test_all_wait_for_data_and_nobody_is_named():
    verdict = judged(stalled(seen(0, LOADS), seen(1, LOADS)))
    assert (verdict.named, verdict.title) == ((), "ranks 0-1 wait for their data")


def test_without_stacks_the_only_one_that_runs_is_named():
    verdict = judged(stalled(seen(0, cores=0.0), seen(1, state="R", cores=1.0)))
    assert verdict.named == (1,)
    assert "No stack of ranks 0-1: not installed." in verdict.notes


def test_without_stacks_a_busy_rank_with_a_gpu_may_be_one_that_waits():
    assert named(seen(0, cores=0.0, holds_gpu=True), seen(1, state="R", cores=1.0, holds_gpu=True)) == ()
    hidden = [seen(0, cores=0.0, holds_gpu=None), seen(1, state="R", cores=1.0, holds_gpu=None)]
    assert named(*hidden, gpus=(GpuUse(index=0),)) == ()


def test_who_cannot_be_seen_is_told_and_not_named():
    verdict = judged(stalled(seen(0, WAITS), seen(1, cores=0.0)))
    assert (verdict.named, verdict.title) == ((), "rank 0 waits in all_reduce, and nothing says where rank 1 stands")


def test_on_gpus_a_python_line_may_be_one_that_waits():
    ranks = [seen(0, BARRIER, holds_gpu=True), seen(1, COMPUTES, "R", cores=1.0, holds_gpu=True)]
    assert named(*ranks) == ()
    ranks[1] = seen(1, COMPUTES, "R", cores=1.0, holds_gpu=True, holds_gil=True)
    assert named(*ranks) == (1,), "what waits for CUDA gives the GIL away"


def test_on_gpus_most_stand_in_one_place():
    ranks = [seen(rank, COMPUTES, "R", holds_gpu=True) for rank in range(3)]
    assert named(*ranks, seen(3, SAVES, holds_gpu=True)) == (3,)


def test_an_idle_gpu_among_busy_ones():
    ranks = [seen(rank, COMPUTES, "R", cores=1.0, holds_gpu=True) for rank in range(2)]
    uses = [GpuUse(index=rank, busy_share=1.0 - rank, pids=(100 + rank,)) for rank in range(2)]
    assert named(*ranks, gpus=tuple(uses)) == (1,)
    assert named(*ranks, gpus=(uses[0],)) == ()


def test_the_flight_recorder_tells_who_posted_fewer_and_who_something_else():
    ahead = [seen(rank, COMPUTES, "R", holds_gpu=True, flight=posted(5)) for rank in range(2)]
    verdict = judged(stalled(*ahead, seen(2, COMPUTES, "R", holds_gpu=True, flight=posted(4))))
    assert verdict.named == (2,)
    assert "all_reduce #5 (4 Float elements)" in verdict.title
    other = seen(2, COMPUTES, "R", holds_gpu=True, flight=posted(5, elements=8))
    assert named(*ahead, other) == (2,)


def test_a_reader_that_takes_nothing_explains_it():
    verdict = judged(stalled(seen(0, WAITS), seen(1, COMPUTES), blocked_seconds=9.0))
    assert (verdict.named, verdict.title) == ((), "nobody reads the output of the command")


def test_an_import_at_work_is_a_start_and_a_sleeping_one_is_none():
    assert is_start(stalled(seen(0, IMPORTS, "R"), seen(1, WAITS)))
    assert not is_start(stalled(seen(0, IMPORTS, "S", cores=0.0), seen(1, WAITS)))
    assert not is_start(stalled(seen(0, IMPORTS, "R"), seen(1, COMPUTES)))


def test_torchrun_that_waits_for_hosts_is_no_culprit():
    stack = ("_wait (dynamic_rendezvous.py:800)", "next_rendezvous (dynamic_rendezvous.py:1100)")
    verdict = judged(stalled(seen(0, stack), guessed=True, world_size=None))
    assert (verdict.named, verdict.title) == ((), "the launcher waits for other hosts")


def test_a_recorder_that_is_not_there_is_told_of_gpus_only():
    why = {"no_flight": "not set"}
    assert "No collectives of rank 0: not set." in judged(stalled(seen(0, WAITS, holds_gpu=True, **why))).notes
    assert judged(stalled(seen(0, WAITS, **why))).notes == ()


def test_a_launcher_of_other_hosts_is_no_culprit():
    verdict = judged(stalled(seen(0), guessed=True, world_size=None, command="srun"))
    assert verdict.named == ()
    assert "srun ddpdiag watch -- COMMAND" in verdict.remedy
    behind = judged(stalled(seen(0), guessed=True, world_size=None, command="run.sh", far_launcher="mpirun"))
    assert (behind.named, behind.title) == ((), "no rank was found on this host")


def test_without_rank_0_a_first_look_names_nobody_who_may_be_on_the_way():
    ranks = [seen(2, WAITS), seen(3, COMPUTES, "R", cores=1.0)]
    first = stalled(*ranks, world_size=4)
    assert judged(first).named == ()
    assert "silent here" in judged(first).title
    assert named(seen(2, WAITS), seen(3, COMPUTES, "T"), world_size=4) == (3,), "nobody is stopped in a healthy one"
    assert stands_as(first, stalled(*ranks, world_size=4))
    assert named(*ranks, world_size=4, unmoved=True) == (3,)


@pytest.mark.parametrize("now", [seen(0, SAVES, "R"), seen(0, COMPUTES, "R", cores=0.5), seen(0), seen(1, COMPUTES)])
def test_who_stands_elsewhere_or_works_otherwise_has_moved(now):
    before = stalled(seen(0, COMPUTES, "R", cores=1.0))
    assert stands_as(before, before)
    assert not stands_as(before, stalled(now))
    assert not stands_as(before, stalled(before.ranks[0], number=2))
    assert not stands_as(None, before)


def test_those_who_are_done_are_not_to_blame_for_a_last_save():
    verdict = judged(stalled(seen(0, SAVES, "R"), *(RankSeen(rank=rank, pid=9) for rank in (1, 2, 3))))
    assert (verdict.named, verdict.moving) == ((), True)
    assert verdict.title == "ranks 1-3 have ended; rank 0 goes on, which is in save (serialization.py:90)"
    assert named(seen(0, SAVES, "T"), seen(1, state="Z")) == (0,), "but it does not go on if it is stopped"


def test_no_rank_at_all():
    assert judged(stalled()).title == "no rank was found"


_STACKS = st.sampled_from([(), WAITS, BARRIER, COMPUTES, SAVES, BACKWARD, LOADS, IMPORTS])
_RANKS = st.lists(
    st.builds(
        lambda stack, state, cores, gpu, gil, flight: (stack, state, cores, gpu, gil, flight),
        _STACKS,
        st.sampled_from(["R", "S", "D", "T", "Z", None]),
        st.sampled_from([0.0, 0.4, 1.0]),
        st.sampled_from([True, False, None]),
        st.sampled_from([True, False, None]),
        st.sampled_from([None, (), posted(3), posted(4)]),
    ),
    max_size=5,
)


@given(_RANKS, st.integers(0, 3))
def test_any_look_is_judged_shown_and_kept(rows, more_ranks):
    ranks = [
        seen(n, stack, state, cores=cores, holds_gpu=gpu, holds_gil=gil, flight=flight)
        for n, (stack, state, cores, gpu, gil, flight) in enumerate(rows)
    ]
    stall = stalled(*ranks, world_size=len(ranks) + more_ranks)
    verdict = judged(stall)
    assert isinstance(verdict, Judged)
    assert set(verdict.named) <= set(range(len(ranks)))
    assert sorted(rank for standing in verdict.standings for rank in standing.ranks) == list(range(len(ranks)))
    text = render(stall, verdict, color=False, width=80)
    assert text.isascii()
    assert decode(encode(stall), Stall) == stall


@given(st.lists(st.sampled_from([WAITS, BARRIER]), min_size=2, max_size=5))
def test_nobody_is_named_without_a_majority(stacks):
    counts = sorted(map(stacks.count, (WAITS, BARRIER)))
    assert bool(named(*(seen(n, stack) for n, stack in enumerate(stacks)))) == (0 < counts[0] < counts[1])
