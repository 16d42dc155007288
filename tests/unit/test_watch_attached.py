"""`ddpdiag watch --pid`: the ranks of a job that runs, what two looks at it show, and the tally."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from ddpdiag.errors import ExitCode, UsageError
from ddpdiag.model import Place, ProcessState
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.watch import WatchArgs, command
from ddpdiag.watch.attach import Events, Tally, compare, ends_text, exit_code, job_pids, local_pids
from ddpdiag.watch.ends import End
from ddpdiag.watch.hosts import Gathering, Looks, send
from ddpdiag.watch.look import Look, RankState
from ddpdiag.watch.processes import KnownProcesses, descendants, find_ranks, read_process

WAITS = ("all_reduce (distributed_c10d.py:3252)", "<module> (train.py:25)")
JOINS = ("_create_c10d_store (rendezvous.py:180)", "init_process_group (distributed_c10d.py:1700)")
SAVES = ("save (serialization.py:90)", "<module> (train.py:40)")
STEPS = ("spin (train.py:7)", "<module> (train.py:14)")
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


# The processes of the job -------------------------------------------------------------------------------------------


def put(root: Path, pid: int, parent: int, name: str = "python3", *, state: str = "S", command: str = "", **env: str):
    """One process of a /proc."""
    folder = root / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {'0 ' * 17}{100 + pid} {'0 ' * 29}")
    (folder / "cmdline").write_text(command or name)
    if env.pop("hidden", None) is None:
        (folder / "environ").write_text("\0".join(f"{key}={value}" for key, value in env.items()))


def rank_variables(rank: int, size: int = 2, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)} | MASTER | more


@pytest.fixture
def root(tmp_path):
    """torchrun 10 with two ranks, one of which has a worker; ranks of two other jobs; a shell; a zombie."""
    put(tmp_path, 10, 1, "pt_elastic", command="torchrun train.py")
    put(tmp_path, 11, 10, **rank_variables(0))
    put(tmp_path, 12, 10, **rank_variables(1))
    put(tmp_path, 13, 12, **rank_variables(1))
    put(tmp_path, 20, 1, **rank_variables(0, MASTER_PORT="29501"))
    put(tmp_path, 30, 1, "bash")
    put(tmp_path, 31, 30, "rsync")
    put(tmp_path, 40, 1, state="Z")
    put(tmp_path, 50, 1, "srun")
    return tmp_path


@pytest.mark.parametrize(("pids", "members"), [((10,), [10]), ((12,), [11, 12]), ((20, 10), [10, 20])])
def test_a_rank_stands_for_its_job_on_this_host(root, pids, members):
    assert job_pids(pids, root) == members


def test_the_ranks_of_a_job_of_slurm_are_those_of_its_steps_and_of_torchrun(tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    put(tmp_path, 10, 1, "bash", **job)  # the batch script
    put(tmp_path, 11, 10, "srun", **job)
    put(tmp_path, 12, 10, **rank_variables(0), SLURM_JOB_ID="7")
    put(tmp_path, 20, 1, **job, SLURM_STEP_ID="0")
    put(tmp_path, 21, 20, **job, SLURM_STEP_ID="0")  # its worker
    put(tmp_path, 30, 1, "ddpdiag", **job, SLURM_STEP_ID="1")  # this process
    put(tmp_path, 40, 1, **job | {"SLURM_JOB_ID": "8"}, SLURM_STEP_ID="0")
    own = job | {"SLURM_STEP_ID": "1"}
    assert local_pids(own, tmp_path) == [12, 20]
    assert local_pids(own | {"SLURM_JOB_ID": "9"}, tmp_path, is_required=False) == []


def ranks_below(root: Path, pid: int):
    return find_ranks(KnownProcesses(root).complete(descendants([pid], root)))


def test_ranks_whose_environment_is_hidden_are_the_launchers_children_with_one_command(tmp_path):
    put(tmp_path, 10, 1, "pt_elastic", command="python torchrun train.py", hidden="")
    for pid, parent, line in (
        (11, 10, "train.py"),
        (12, 10, "train.py"),
        (13, 11, "train.py"),
        (14, 11, "multiprocessing"),
    ):
        put(tmp_path, pid, parent, command=f"python {line}", hidden="")
    found = ranks_below(tmp_path, 10)
    assert ({rank: each.pid for rank, each in found.by_rank.items()}, found.are_guessed) == ({0: 11, 1: 12}, True)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (rank_variables(1, 4), (0, 2, 3)),  # all ranks are on this host, by MASTER_ADDR
        (rank_variables(1, 4, MASTER_ADDR="node7"), ()),
        (rank_variables(1, 4, MASTER_ADDR="node7", LOCAL_WORLD_SIZE="2"), (0,)),
        (rank_variables(5, 8, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4"), (4, 6, 7)),
        (rank_variables(0, 1), ()),
    ],
)
def test_ranks_that_have_ended_are_known_from_the_others(tmp_path, variables, missing):
    put(tmp_path, 7, 1, **variables)
    assert ranks_below(tmp_path, 7).missing == missing


def test_wrong_pids_and_options_are_one_sentence(golden, root):
    put(root, 60, 1, "bash")
    put(root, 61, 60, **rank_variables(0, MASTER_PORT="29502"))
    put(root, 62, 60, **rank_variables(0, MASTER_PORT="29503"))
    for pid in (9, 30, 40, 50, 60):
        with pytest.raises(UsageError) as error:
            job_pids([pid], root)
        golden(str(error.value))
    with pytest.raises(UsageError) as error:
        local_pids({}, root)
    golden(str(error.value))
    with pytest.raises(UsageError) as error:
        local_pids({"SLURM_JOB_ID": "8"}, root)
    golden(str(error.value))
    for words, options in (
        (["torchrun"], {"pid": (1,)}),
        ([], {"pid": (1,), "kill": True}),
        ([], {"pid": (1,), "attach": True}),
        ([], {}),
        (["torchrun"], {"every": 30.0}),
    ):
        with pytest.raises(UsageError) as error:
            command.run(words, WatchArgs(**options))
        golden(str(error.value))


# Looks --------------------------------------------------------------------------------------------------------------


def seen(rank: int, stack=WAITS, *, state: str = "S", gpu: bool = False, **counts: int) -> RankState:
    process = ProcessState(pid=100 + rank, state=state, stack=stack)
    counts = {"switches": 5, "written_bytes": 9} | counts
    return RankState(rank=rank, pid=100 + rank, process=process, core_share=0.0, holds_gpu=gpu, **counts)


def look_at(*ranks: RankState, at: float = 0.0) -> Look:
    facts = {"host": "n0", "silent_seconds": 0.0, "stall_seconds": 300.0, "command": "", "is_requested": True}
    return Look(ranks=ranks, unix_seconds=at, world_size=len(ranks), **facts)


UNKNOWN = ExitCode.UNKNOWN
PAIRS = {
    "a wait without a wake-up": ([seen(0), seen(1, SAVES)], [seen(0), seen(1, SAVES)], 1),
    "the awaited rank moves": ([seen(0), seen(1, SAVES)], [seen(0), seen(1, STEPS)], 1),
    "the waiting rank woke up": ([seen(0), seen(1, SAVES)], [seen(0, switches=6), seen(1, SAVES)], 0),
    "the waiting rank is elsewhere": ([seen(0), seen(1, SAVES)], [seen(0, STEPS), seen(1, SAVES)], 0),
    "all are elsewhere": ([seen(0, STEPS), seen(1, SAVES)], [seen(0, SAVES), seen(1, STEPS)], 0),
    "the wait has only begun": ([seen(0, STEPS), seen(1, SAVES)], [seen(0), seen(1, SAVES)], UNKNOWN),
    "a stopped rank": ([seen(0, STEPS), seen(1, STEPS, state="T")], [seen(0), seen(1, STEPS, state="T")], 1),
    "an ended rank": ([seen(0), seen(1)], [seen(0), RankState(rank=1, pid=101)], 1),
    "all wait": ([seen(0), seen(1)], [seen(0), seen(1)], UNKNOWN),
    "all woke up": (
        [seen(0, STEPS), seen(1, STEPS)],
        [seen(0, STEPS, switches=6), seen(1, STEPS, switches=9)],
        UNKNOWN,
    ),
    "all woke up, and one has written": (
        [seen(0, STEPS), seen(1, STEPS)],
        [seen(0, STEPS, switches=6, written_bytes=60), seen(1, STEPS, switches=9)],
        0,
    ),
    "with GPUs, a wake-up is no progress": (
        [seen(0, STEPS, gpu=True), seen(1, SAVES, gpu=True)],
        [seen(0, STEPS, gpu=True, switches=6), seen(1, SAVES, gpu=True)],
        UNKNOWN,
    ),
    "a store polls while ranks join": (
        [seen(0, JOINS), seen(1, JOINS)],
        [seen(0, JOINS, switches=600), seen(1, JOINS)],
        UNKNOWN,
    ),
    "a rank that is not in the store": (
        [seen(0, JOINS), seen(1, SAVES)],
        [seen(0, JOINS, switches=600), seen(1, SAVES)],
        1,
    ),
    "a stack is not read": ([seen(0), seen(1, SAVES)], [seen(0, ()), seen(1, SAVES)], UNKNOWN),
    "a rank is started": ([seen(0, STEPS)], [seen(0, SAVES), seen(1, STEPS)], UNKNOWN),
    "the only process": ([seen(0, SAVES)], [seen(0, SAVES)], 1),
    "the only process wakes up": ([seen(0, SAVES)], [seen(0, SAVES, switches=6)], UNKNOWN),
    "the only process, with a hidden stack": ([seen(0, ())], [seen(0, ())], UNKNOWN),
    "hidden stacks, all asleep": ([seen(0, ()), seen(1, ())], [seen(0, ()), seen(1, ())], UNKNOWN),
    "hidden stacks, one woke up": ([seen(0, ()), seen(1, ())], [seen(0, ()), seen(1, (), switches=6)], UNKNOWN),
}


@pytest.mark.parametrize(("before", "now", "code"), PAIRS.values(), ids=PAIRS)
def test_two_looks_show_progress_or_a_standstill_or_neither(before, now, code):
    first = compare(None, look_at(*before))
    assert exit_code(compare(first, look_at(*now, at=1.0))) == code


def test_the_first_look_alone_names_only_ranks_that_do_not_continue():
    assert exit_code(compare(None, look_at(seen(0), seen(1, SAVES)))) == UNKNOWN
    assert exit_code(compare(None, look_at(seen(0), seen(1, state="T")))) == ExitCode.UNFIT


def test_the_tally_tells_a_straggler_from_a_hang(golden):
    waits = look_at(seen(0), seen(1, SAVES))
    for progress in ("Rank 0 has left all_reduce within 30.0 s.", ""):
        tally = Tally()
        for _ in range(9):
            tally.add(structs.replace(waits, progress=progress))
        tally.add(look_at(seen(0), seen(1, SAVES), seen(2, STEPS)))  # most have not reached the collective yet
        golden(*tally.lines())


def launch(rank: int) -> Launch:
    return Launch(
        place=Place(rank=rank, world_size=3, host=f"n{rank}", launcher="slurm"),
        master_addr="127.0.0.1",
        port=29500,
        run_id=f"watch-{os.getpid()}",
        layout=("n0", "n1", "n2"),
    )


def test_rank_0_merges_the_looks_of_all_hosts_and_names_those_that_are_absent(golden, monkeypatch):
    monkeypatch.setenv("DDPDIAG_TOKEN", "secret")
    looks = [look_at(seen(0)), structs.replace(look_at(seen(4, SAVES)), host="n1", world_size=8)]
    gathering = Gathering(launch(0))
    with ThreadPoolExecutor() as pool:
        code = pool.submit(send, launch(1), Looks(looks[1], looks[1]))
        first, last = gathering.gather(Looks(looks[0], looks[0]), 1.0)
        gathering.dismiss(exit_code(compare(compare(None, first), last)))
        assert code.result() == ExitCode.UNFIT
    assert (last.host, last.world_size, [state.rank for state in last.ranks]) == ("n[0-1]", 8, [0, 4])
    golden(*last.missing_evidence)


@pytest.mark.parametrize(
    ("codes", "code"), [((-9, 1, 1), 1), ((1, -9, -9), 1), ((0, 0, 0), 0), ((None, -9, -9), UNKNOWN)]
)
def test_the_rank_that_ended_first_decides_after_the_job(golden, codes, code):
    events = Events()
    events.order.ends = {rank: End(rank / 4, code) for rank, code in enumerate(codes)}
    golden(*ends_text(events.order.ends))
    assert events.exit_code(UNKNOWN) == code


def test_ends_of_processes_are_noticed_with_their_status():
    child = subprocess.Popen(["sleep", "60"])
    events = Events()
    events.order.follow({3: read_process(child.pid)})
    assert list(ends_text(events.order.ends)) == []
    child.kill()
    assert not events.wait(10)
    assert ({rank: end.code for rank, end in events.order.ends.items()}, events.order.all_ended) == ({3: -9}, True)
    child.wait()
