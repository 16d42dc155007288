"""The rank that a look at a silent training names."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.model import Collective, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.watch import WatchArgs
from ddpdiag.watch.judge import judge, missing_evidence, rank_groups
from ddpdiag.watch.look import Helper, Look, RankState
from ddpdiag.watch.report import Reporter, render

WAITS = ("all_reduce (distributed_c10d.py:3252)", "wrapper (c10d_logger.py:83)", "<module> (train.py:25)")
BARRIER = ("barrier (distributed_c10d.py:4900)", "<module> (train.py:30)")
COMPUTES = ("spin (train.py:7)", "<module> (train.py:14)")
SAVES = ("save (serialization.py:90)", "<module> (train.py:40)")
BACKWARD = ("_engine_run_backward (graph.py:841)", "backward (__init__.py:353)", "<module> (train.py:20)")
LOADS = ("select (selectors.py:415)", "poll (connection.py:257)", "_try_get_data (dataloader.py:1131)")
RENDEZVOUS = ("_wait (dynamic_rendezvous.py:800)", "next_rendezvous (dynamic_rendezvous.py:1100)")
IMPORTS = ("<module> (serialization.py:9)", "_find_and_load (<frozen importlib._bootstrap>:1176)")


def seen(rank: int, stack=(), state="S", *, cores=0.0, **more) -> RankState:
    facts = {"holds_gpu": False, "why_no_stack": "" if stack else "not installed"} | more
    process = ProcessState(pid=100 + rank, state=state, stack=stack, wchan=facts.pop("wchan", None))
    return RankState(rank=rank, pid=100 + rank, process=process, core_share=cores, **facts)


def stalled(*ranks: RankState, **more) -> Look:
    facts = {"host": "n0", "unix_seconds": 0.0, "silent_seconds": 9.0, "stall_seconds": 8.0, "command": "torchrun"}
    return Look(**facts | {"ranks": ranks, "world_size": len(ranks)} | more)


def named(*ranks: RankState, **more) -> tuple[int, ...]:
    return judge(stalled(*ranks, **more)).ranks


def words(look: Look) -> str:
    finding = judge(look)
    return "\n".join((finding.title, finding.message, finding.fix, *missing_evidence(look)))


def posted(seq: int, name: str = "nccl:all_reduce", elements: int = 4) -> tuple[Collective, ...]:
    return tuple(Collective(seq=n, name=name, elements=elements, dtype="Float", group="0") for n in range(1, seq + 1))


def recorded(rank: int, collectives: tuple[Collective, ...]) -> RankState:
    return seen(rank, COMPUTES, "R", holds_gpu=True, collectives=collectives)


GUESSED = {"ranks_are_guessed": True, "world_size": None}
AHEAD = (recorded(0, posted(5)), recorded(1, posted(5)))


NAMED = {
    "one stopped, one elsewhere": ([seen(0, WAITS), seen(1, COMPUTES, "R"), seen(2, WAITS, "T")], (2,)),
    "one of two not in the collective": ([seen(0, WAITS), seen(1, COMPUTES, "R", cores=1.0)], (1,)),
    "one waits for most": ([seen(0, BARRIER), *(seen(rank, SAVES) for rank in range(1, 4))], (1, 2, 3)),
    "two in different collectives": ([seen(0, WAITS), seen(1, BARRIER)], ()),
    "one of three in another collective": ([seen(0, WAITS), seen(1, BARRIER), seen(2, WAITS)], (1,)),
    "a sleeping backward waits": ([seen(0, BACKWARD, cores=0.0), seen(1, SAVES)], (1,)),
    "a busy backward computes": ([seen(0, WAITS), seen(1, BACKWARD, "R", cores=1.0)], (1,)),
    "a zombie": ([seen(0, WAITS), seen(1, state="Z")], (1,)),
    "a process that is gone": ([seen(0, WAITS), RankState(rank=1, pid=101)], (1,)),
    "no stacks, and a busy rank with a GPU may wait": (
        [seen(0, holds_gpu=True), seen(1, state="R", cores=1.0, holds_gpu=True)],
        (),
    ),
    "with a GPU, a Python line may wait": (
        [seen(0, BARRIER, holds_gpu=True), seen(1, COMPUTES, "R", cores=1.0, holds_gpu=True)],
        (),
    ),
    "with a GPU and the GIL, which a wait for CUDA releases": (
        [seen(0, BARRIER, holds_gpu=True), seen(1, COMPUTES, "R", cores=1.0, holds_gpu=True, holds_gil=True)],
        (1,),
    ),
    "with GPUs, most are in one place": (
        [*(seen(rank, COMPUTES, "R", holds_gpu=True) for rank in range(3)), seen(3, SAVES, holds_gpu=True)],
        (3,),
    ),
}


@pytest.mark.parametrize(("witnesses", "ranks"), NAMED.values(), ids=NAMED)
def test_the_right_rank_is_named(witnesses, ranks):
    assert named(*witnesses) == ranks


@pytest.mark.parametrize(
    "stall",
    [
        pytest.param(stalled(), id="no rank was found"),
        pytest.param(stalled(seen(0, WAITS), seen(1, WAITS)), id="all are in one collective"),
        pytest.param(stalled(seen(0, WAITS), seen(1, WAITS), world_size=4), id="all of this host are in one"),
        pytest.param(stalled(seen(0, LOADS), seen(1, LOADS)), id="all wait for data"),
        pytest.param(stalled(seen(0, WAITS), seen(1, cores=0.0)), id="one cannot be seen"),
        pytest.param(stalled(seen(0, WAITS), seen(1, COMPUTES), blocked_seconds=9.0), id="a reader takes nothing"),
        pytest.param(stalled(seen(0, RENDEZVOUS), **GUESSED), id="torchrun waits for hosts"),
        pytest.param(stalled(seen(0), **GUESSED, command="srun"), id="a launcher of other hosts"),
    ],
)
def test_nobody_is_named_where(golden, stall):
    assert judge(stall).ranks == ()
    golden(words(stall))


@pytest.mark.parametrize(
    ("stall", "ranks"),
    [
        pytest.param(
            stalled(seen(0, WAITS), seen(1, SAVES, "D", wchan="nfs_wait_on_request")), (1,), id="stuck in the kernel"
        ),
        pytest.param(stalled(seen(0, cores=0.0), seen(1, state="R", cores=1.0)), (1,), id="the only one that runs"),
        pytest.param(stalled(*AHEAD, recorded(2, posted(4))), (2,), id="posted fewer"),
        pytest.param(stalled(*AHEAD, recorded(2, posted(5, elements=8))), (2,), id="posted something else"),
    ],
)
def test_who_is_named_is_told_why(golden, stall, ranks):
    assert judge(stall).ranks == ranks
    golden(words(stall))


@pytest.mark.parametrize("state", ["T", "D", "Z", "S"])
def test_who_waits_for_data_is_named_and_its_sick_worker_told(golden, state):
    worker = Helper(pid=7, name="python", state=state)
    look = stalled(seen(0, WAITS), seen(1, LOADS, helpers=(worker,)))
    assert judge(look).ranks == (1,)
    golden(words(look))


def test_where_gpus_are_hidden_a_busy_rank_may_be_one_that_waits():
    hidden = [seen(0, holds_gpu=None), seen(1, state="R", cores=1.0, holds_gpu=None)]
    assert named(*hidden, gpus=(GpuUse(index=0),)) == ()


def test_an_idle_gpu_among_busy_ones():
    ranks = [seen(rank, COMPUTES, "R", cores=1.0, holds_gpu=True) for rank in range(2)]
    uses = [GpuUse(index=rank, busy_share=1.0 - rank, pids=(100 + rank,)) for rank in range(2)]
    assert named(*ranks, gpus=tuple(uses)) == (1,)
    assert named(*ranks, gpus=(uses[0],)) == ()


def test_an_import_at_work_is_a_start_and_a_sleeping_one_is_none():
    assert stalled(seen(0, IMPORTS, "R"), seen(1, WAITS)).is_starting
    assert not stalled(seen(0, IMPORTS, "S", cores=0.0), seen(1, WAITS)).is_starting
    assert not stalled(seen(0, IMPORTS, "R"), seen(1, COMPUTES)).is_starting


def test_a_recorder_that_is_not_there_is_told_of_gpus_only(golden):
    why = {"why_no_collectives": "not set"}
    golden(*missing_evidence(stalled(seen(0, WAITS, holds_gpu=True, **why))))
    assert missing_evidence(stalled(seen(0, WAITS, **why))) == ()
    assert missing_evidence(stalled(seen(0, WAITS, **why), has_flight_recorder=True)) != (), (
        "unless the recorders were asked for"
    )


def shown(look: Look, **how) -> str:
    """The report, with a time that is the same in all time zones."""
    when = time.strftime("%H:%M:%S", time.localtime(look.unix_seconds))
    return render(look, judge(look), missing_evidence(look), color=False, width=80, **how).replace(when, "HH:MM:SS")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_report_shows_stacks_unless_quiet(golden, quiet):
    golden(shown(stalled(seen(0, WAITS), seen(1, COMPUTES), why_no_gpus="no GPU was looked at"), quiet=quiet))


def test_a_note_is_shown_once_and_again_on_request():
    texts: list[str] = []
    reporter = Reporter(WatchArgs(), texts.append)
    for asked in (False, False, True):
        reporter.report(stalled(is_requested=asked, missing_evidence=("No stack of rank 0: refused.",)))
    assert ["refused" in text for text in texts] == [True, False, True]


def test_without_rank_0_a_first_look_names_nobody_who_may_be_on_the_way(golden):
    ranks = [seen(2, WAITS), seen(3, COMPUTES, "R", cores=1.0)]
    first = stalled(*ranks, world_size=4)
    assert judge(first).ranks == ()
    golden(words(first))
    assert named(seen(2, WAITS), seen(3, COMPUTES, "T"), world_size=4) == (3,), "nobody is stopped in a healthy one"
    assert stalled(*ranks, world_size=4).is_unmoved(first)
    assert named(*ranks, world_size=4, all_unmoved=True) == (3,)


@pytest.mark.parametrize("now", [seen(0, SAVES, "R"), seen(0, COMPUTES, "R", cores=0.5), seen(0), seen(1, COMPUTES)])
def test_who_stands_elsewhere_or_works_otherwise_has_moved(now):
    before = stalled(seen(0, COMPUTES, "R", cores=1.0))
    assert before.is_unmoved(before)
    assert not stalled(now).is_unmoved(before)
    assert not before.is_unmoved(None)


def test_those_who_are_done_are_not_to_blame_for_a_last_save(golden):
    look = stalled(seen(0, SAVES, "R"), *(RankState(rank=rank, pid=9) for rank in (1, 2, 3)))
    assert (judge(look).ranks, judge(look).code) == ((), "watch.last")
    assert named(seen(0, SAVES, "T"), seen(1, state="Z")) == (0,), "but it does not go on if it is stopped"
    golden(words(look))


_RANKS = st.lists(
    st.tuples(
        st.sampled_from([(), WAITS, BARRIER, COMPUTES, SAVES, BACKWARD, LOADS, IMPORTS]),
        st.sampled_from(["R", "S", "D", "T", "Z", None]),
        st.sampled_from([0.0, 0.4, 1.0]),
        st.sampled_from([True, False, None]),
        st.sampled_from([True, False, None]),
        st.sampled_from([None, (), posted(3), posted(4)]),
    ),
    max_size=5,
)


@given(_RANKS, st.integers(0, 3))
def test_any_look_is_judged_and_shown(rows, more_ranks):
    ranks = [
        seen(n, stack, state, cores=cores, holds_gpu=gpu, holds_gil=gil, collectives=collectives)
        for n, (stack, state, cores, gpu, gil, collectives) in enumerate(rows)
    ]
    stall = stalled(*ranks, world_size=len(ranks) + more_ranks)
    finding = judge(stall)
    assert set(finding.ranks) <= set(range(len(ranks)))
    assert sorted(rank for group, _ in rank_groups(stall, finding.ranks) for rank in group) == list(range(len(ranks)))
    assert render(stall, finding, missing_evidence(stall), color=False, width=80).isascii()


@given(st.lists(st.sampled_from([WAITS, BARRIER]), min_size=2, max_size=5))
def test_nobody_is_named_without_a_majority(stacks):
    counts = sorted(map(stacks.count, (WAITS, BARRIER)))
    assert bool(named(*(seen(n, stack) for n, stack in enumerate(stacks)))) == (0 < counts[0] < counts[1])
