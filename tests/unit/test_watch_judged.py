"""The rank that a look at a silent training names."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ddpdiag.evidence.witness import Group, Witness
from ddpdiag.model import Collective, ProcessState
from ddpdiag.probes.gpu.nvml import GpuUse
from ddpdiag.watch import WatchArgs
from ddpdiag.watch.evidence import Stacks
from ddpdiag.watch.judge import judge, missing_evidence, rank_groups
from ddpdiag.watch.look import Helper, Look, RankState, UserFrame
from ddpdiag.watch.observer import with_helper_stacks
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
    return judge(stalled(*ranks, **more))[0].ranks


def words(look: Look) -> str:
    texts = [text for finding in judge(look) for text in (finding.title, finding.message, finding.fix)]
    return "\n".join((*texts, *missing_evidence(look)))


def posted(seq: int, name: str = "nccl:all_reduce", elements: int = 4) -> Witness:
    done = Collective(seq=1, name=name, elements=elements, dtype="Float", group="0", ended=True)
    operations = tuple(structs.replace(done, seq=n, ended=n < 5) for n in range(1, seq + 1))
    return Witness(rank=0, operations=operations, posted={"0": seq}, groups={"0": Group()}, knows_ends=True)


def recorded(rank: int, witness: Witness) -> RankState:
    return seen(rank, COMPUTES, "R", holds_gpu=True, witness=witness)


def user(*lines: int, path: str = "/home/u/train.py") -> tuple[UserFrame, ...]:
    return tuple(UserFrame("step", path, line) for line in lines)


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


POLLS = ("wait_for_file (train.py:9)", "<module> (train.py:14)")
DIED = seen(1, state="Z")
STUCK = seen(3, SAVES, "D")
ODD = recorded(3, posted(5, elements=8))
TWO_JOINT_CALLS = [seen(0, WAITS), seen(1, WAITS), seen(2, BARRIER)]
# The codes of the findings, with the ranks that each one names.
SEVERAL = {
    "stopped, stuck": ([seen(0, WAITS), seen(1, WAITS, "T"), STUCK], {"stopped": (1,), "stuck": (3,)}),
    "stopped, elsewhere": (
        [seen(0, WAITS), seen(1, WAITS, "T"), seen(2, COMPUTES)],
        {"stopped": (1,), "awaited": (2,)},
    ),
    "stopped, may wait for it": ([seen(0, WAITS), seen(1, WAITS, "T"), seen(2, POLLS)], {"stopped": (1,)}),
    "ended, stuck": ([seen(0, WAITS), DIED, STUCK], {"gone": (1,), "stuck": (3,)}),
    "ended, handles the error": ([seen(0, WAITS), DIED, seen(2, COMPUTES, "R", cores=1.0)], {"gone": (1,)}),
    "no data, elsewhere": (
        [seen(0, WAITS), seen(1, LOADS, helpers=(Helper(pid=7, name="python", state="T"),)), seen(2, COMPUTES)],
        {"starved": (1,), "awaited": (2,)},
    ),
    "mismatch, stopped": (
        [*AHEAD, recorded(2, posted(5)), ODD, seen(4, WAITS, "T")],
        {"stopped": (4,), "mismatch": (3,)},
    ),
    "mismatch of two, a third sleeps": (
        [*(recorded(rank, posted(5, elements=8 if rank in (2, 3) else 4)) for rank in range(6)),
         seen(6, COMPUTES, holds_gpu=True, witness=posted(0))],
        {"mismatch": (2, 3), "behind": (6,)},
    ),
    "mismatch, may wait for its GPU": (
        [*AHEAD, recorded(2, posted(5)), ODD, seen(4, COMPUTES, "R", cores=1.0, holds_gpu=True, witness=posted(4))],
        {"mismatch": (3,)},
    ),
    "elsewhere, different collectives": ([*TWO_JOINT_CALLS, seen(3, SAVES)], {"awaited": (3,), "paths": ()}),
    "elsewhere, one rank has the result already": (
        [seen(0, ("broadcast (distributed_c10d.py:9)",)), seen(1, BARRIER), seen(2, SAVES)],
        {"awaited": (2,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("states", "ranks"), SEVERAL.values(), ids=SEVERAL)
def test_several_faults_are_several_findings(states, ranks):
    findings = judge(stalled(*states))
    assert {finding.code.removeprefix("watch."): finding.ranks for finding in findings} == ranks


def test_without_rank_0_only_the_first_fault_is_certain():
    ranks = [seen(1, WAITS), seen(2, WAITS, "T"), seen(3, COMPUTES)]
    assert [finding.ranks for finding in judge(stalled(*ranks, world_size=4))] == [(2,)]
    assert [finding.ranks for finding in judge(stalled(*ranks, world_size=4, all_unmoved=True))] == [(2,), (3,)]


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
    assert judge(stall)[0].ranks == ()
    golden(words(stall))


@pytest.mark.parametrize(
    ("stall", "ranks"),
    [
        pytest.param(
            stalled(seen(0, WAITS), seen(1, SAVES, "D", wchan="nfs_wait_on_request")), (1,), id="stuck in the kernel"
        ),
        pytest.param(stalled(seen(0, cores=0.0), seen(1, state="R", cores=1.0)), (1,), id="the only one that runs"),
        pytest.param(
            stalled(
                seen(0, WAITS, user_frames=user(25)),
                seen(1, ("readinto (socket.py:700)", "step (train.py:23)"), user_frames=user(23)),
            ),
            (1,),
            id="the user's line is first",
        ),
        pytest.param(stalled(*AHEAD, recorded(2, posted(4))), (2,), id="posted fewer"),
        pytest.param(stalled(*AHEAD, recorded(2, posted(5, elements=8))), (2,), id="posted something else"),
    ],
)
def test_who_is_named_is_told_why(golden, stall, ranks):
    assert judge(stall)[0].ranks == ranks
    golden(words(stall))


@pytest.mark.parametrize("state", ["T", "D", "Z", "S"])
def test_who_waits_for_data_is_named_and_its_sick_worker_told(golden, state):
    worker = Helper(pid=7, name="python", state=state)
    look = stalled(seen(0, WAITS), seen(1, LOADS, helpers=(worker,)))
    assert judge(look)[0].ranks == (1,)
    golden(words(look))


MAKES = (
    "decode (data.py:40)",
    "__getitem__ (data.py:12)",
    "_MapDatasetFetcher.fetch (fetch.py:54)",
    "_worker_loop (worker.py:320)",
)
IDLES = ("select (selectors.py:415)", "get (queues.py:113)", "_worker_loop (worker.py:292)")


@pytest.mark.parametrize(
    ("rank_stack", "worker_stack"),
    [(LOADS, MAKES), (LOADS, IDLES), (("_try_wait (subprocess.py:2053)", "step (train.py:23)"), MAKES)],
    ids=["makes a batch", "waits for work", "a child process"],
)
def test_the_place_of_a_process_for_which_a_rank_waits_is_told(golden, rank_stack, worker_stack):
    worker = Helper(
        pid=7, name="python", state="S", stack=worker_stack, user_frames=(UserFrame("decode", "/u/data.py", 40),)
    )
    look = stalled(seen(0, WAITS), seen(1, rank_stack, helpers=(worker,), user_frames=user(23)))
    assert ("stack_of_pid_7" in judge(look)[0].evidence) == (worker_stack is MAKES)
    golden(words(look))


def test_the_stacks_of_at_most_four_processes_are_read_the_suspicious_ones_first():
    workers = [Helper(pid=pid, name="python", state="S", wchan="do_poll") for pid in range(10, 18)]
    slow = Helper(pid=20, name="python", state="S", wchan="hrtimer_nanosleep")
    stopped = Helper(pid=21, name="python", state="T")
    read: list[int] = []

    def read_stacks(pid: int) -> Stacks:
        read.append(pid)
        return Stacks(MAKES + ("run (process.py:108)",) * 99)

    waiting = seen(0, LOADS, helpers=(*workers, slow, stopped))
    states = with_helper_stacks([waiting, seen(1, COMPUTES, helpers=(slow,))], read_stacks)
    assert read == [21, 20, 10, 11]
    assert {helper.pid: len(helper.stack) for helper in states[0].helpers if helper.stack} == dict.fromkeys(read, 17)
    read.clear()
    with_helper_stacks([seen(rank, LOADS, helpers=(*workers, slow)) for rank in range(6)], read_stacks)
    assert len(read) <= 4


def test_ranks_at_different_lines_of_a_loop_are_one_group():
    def lines(*numbers: int) -> list[str]:
        states = [seen(rank, (f"step (train.py:{n})",), user_frames=user(n)) for rank, n in enumerate(numbers)]
        return [text for _, text in rank_groups(stalled(*states), ())]

    assert lines(7, 7) == ["sleeping in step (train.py:7)"]
    assert lines(7, 8) == ["sleeping in step (train.py)"]


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
    assert judge(first)[0].ranks == ()
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
    assert [(finding.ranks, finding.code) for finding in judge(look)] == [((), "watch.last")]
    assert named(seen(0, SAVES, "T"), seen(1, state="Z")) == (0,), "but it does not go on if it is stopped"
    golden(words(look))


_RANKS = st.lists(
    st.tuples(
        st.sampled_from([(), WAITS, BARRIER, COMPUTES, SAVES, BACKWARD, LOADS, IMPORTS]),
        st.sampled_from(["R", "S", "D", "T", "Z", None]),
        st.sampled_from([0.0, 0.4, 1.0]),
        st.sampled_from([True, False, None]),
        st.sampled_from([True, False, None]),
        st.sampled_from([None, posted(0), posted(3), posted(4)]),
    ),
    max_size=5,
)


@given(_RANKS, st.integers(0, 3))
def test_any_look_is_judged_and_shown(rows, more_ranks):
    ranks = [
        seen(n, stack, state, cores=cores, holds_gpu=gpu, holds_gil=gil, witness=witness)
        for n, (stack, state, cores, gpu, gil, witness) in enumerate(rows)
    ]
    stall = stalled(*ranks, world_size=len(ranks) + more_ranks)
    findings = judge(stall)
    named_ranks = [rank for finding in findings for rank in finding.ranks]
    assert len(set(named_ranks)) == len(named_ranks), "no rank is in two findings"
    assert set(named_ranks) <= set(range(len(ranks)))
    assert sorted(rank for group, _ in rank_groups(stall, named_ranks) for rank in group) == list(range(len(ranks)))
    assert render(stall, findings, missing_evidence(stall), color=False, width=80).isascii()


@given(st.lists(st.sampled_from([WAITS, BARRIER]), min_size=2, max_size=5))
def test_nobody_is_named_without_a_majority(stacks):
    counts = sorted(map(stacks.count, (WAITS, BARRIER)))
    assert bool(named(*(seen(n, stack) for n, stack in enumerate(stacks)))) == (0 < counts[0] < counts[1])
