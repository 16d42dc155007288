"""What is read of strangers' processes: who is a rank, flight recorders, stacks, and why they are refused."""

import json
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
from msgspec import structs

from ddpdiag.model import Finding, ProcessState
from ddpdiag.probes.gpu.visibility import holds_gpu
from ddpdiag.probes.host.kernel import environ
from ddpdiag.watch import evidence
from ddpdiag.watch.look import RankState, UserFrame
from ddpdiag.watch.pitfalls import find_pitfalls
from ddpdiag.watch.processes import Process, descendants, find_ranks, read_process

ENTRY = {
    "record_id": 2,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 3,
    "p2p_seq_id": 0,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_795_324_547_978_581_727,
    "input_sizes": [[3, 2]],
    "input_dtypes": ["Float"],
    "state": "scheduled",
    "time_discovered_started_ns": None,
    "retired": False,
    "is_p2p": False,
    "frames": [{"name": "f", "filename": "train.py", "line": 3}],
}
TRACE = {"version": "2.10", "pg_status": {"0": {"last_enqueued_collective": 3}}, "entries": [ENTRY]}


def task(pid: int, parent: int, name: str = "python", *, spawned: bool = False) -> Process:
    return Process(pid, parent, name, "S", pid, command="-c from multiprocessing.spawn import spawn_main" * spawned)


def ranks_of(tasks, environs) -> dict[int, int]:
    found = find_ranks([structs.replace(one, environ=environs.get(one.pid, {})) for one in tasks])
    assert found.world_size in (None, 2)
    return {rank: own.pid for rank, own in found.by_rank.items()}


def env(rank: int | None = None, **more: str) -> dict[str, str]:
    return ({} if rank is None else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}) | more


def test_of_what_a_rank_started_the_topmost_is_the_rank():
    tasks = [task(1, 0), task(2, 1), task(3, 1), task(4, 2), task(5, 3)]
    assert ranks_of(tasks, {1: env(), 2: env(0), 3: env(1), 4: env(0), 5: env(1)}) == {0: 2, 1: 3}


def test_torchrun_below_a_launcher_that_gives_ranks_itself():
    slurm = {"SLURM_PROCID": "0"}
    tasks = [task(1, 0), task(2, 1), task(3, 1)]
    assert ranks_of(tasks, {1: slurm, 2: env(0, **slurm), 3: env(1, **slurm)}) == {0: 2, 1: 3}
    # PyTorchJob of Kubernetes gives each pod a RANK, and torchrun in it is none.
    assert ranks_of(tasks, {1: {"RANK": "1", "WORLD_SIZE": "2"}, 2: env(8), 3: env(9)}) == {8: 2, 9: 3}


def test_a_shell_in_front_of_the_training_is_not_it():
    tasks = [task(1, 0, "bash"), task(2, 1, "numactl"), task(3, 2, "python3"), task(4, 3)]
    assert ranks_of(tasks, {pid: {"SLURM_PROCID": "5"} for pid in (1, 2, 3, 4)}) == {5: 3}


def test_without_variables_there_is_one_process():
    found = find_ranks([task(1, 0), task(2, 1)])
    assert (found.by_rank[0].pid, found.are_guessed, found.world_size) == (1, True, None)


def test_spawned_ranks_are_numbered_as_they_were_started_and_their_own_children_are_none():
    spawned = [task(3, 1, spawned=True), task(4, 1, spawned=True), task(5, 3, spawned=True)]
    found = find_ranks([task(1, 0), task(2, 1), *spawned])
    assert ({rank: own.pid for rank, own in found.by_rank.items()}, found.are_guessed) == ({0: 3, 1: 4}, True)


def test_our_own_process_is_below_itself():
    own = os.getpid()
    assert own in [found.pid for found in descendants([os.getppid()])]
    assert read_process(own).parent == os.getppid()
    assert environ(own) is not None


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/kfd", "/dev/dri/renderD128", "/dev/accel/accel0", "/dev/dxg"])
def test_an_open_device_of_any_maker_is_a_gpu(tmp_path, device):
    folder = tmp_path / "1" / "fd"
    folder.mkdir(parents=True)
    (folder / "0").symlink_to("/dev/null")
    assert holds_gpu(1, tmp_path) is False
    (folder / "3").symlink_to(device)
    assert holds_gpu(1, tmp_path) is True


def test_a_process_that_is_gone_shows_nothing(tmp_path):
    assert read_process(1, tmp_path) is None
    assert environ(1, tmp_path) is None
    assert descendants([1], tmp_path / "nothing") == []


def test_a_dump_that_a_rank_writes_on_request_is_read(tmp_path):
    (tmp_path / "dump").write_bytes(pickle.dumps(TRACE, protocol=2))
    witness = evidence.await_dump(evidence.Request(5, tmp_path / "dump", 0), time.monotonic() + 5)
    assert [(c.seq, c.name, c.elements, c.group) for c in witness.operations] == [(3, "nccl:all_reduce", 6, "0")]
    assert (witness.rank, witness.newest_unix_seconds) == (5, pytest.approx(1_795_324_547.98))


def _nccl(pipe: Path, file: Path) -> threading.Thread:
    """The thread that watches NCCL's heartbeat, as far as the recorder is concerned."""
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def answer() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                if os.read(descriptor, 128):
                    break
            except BlockingIOError:
                pass
            time.sleep(0.02)
        os.close(descriptor)
        file.write_bytes(pickle.dumps(TRACE, protocol=2))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_process_is_asked_through_its_pipe(golden, tmp_path):
    variables = {evidence.PIPE_VARIABLE: f"{tmp_path}/ask-", evidence.FILE_VARIABLES[0]: f"{tmp_path}/rank-"}
    thread = _nccl(tmp_path / "ask-3.pipe", tmp_path / "rank-3")
    asked = evidence.request_dump(os.getpid(), 3, variables)
    assert isinstance(asked, evidence.Request)
    assert evidence.await_dump(asked, time.monotonic() + 5).operations[0].seq == 3
    thread.join()
    again = evidence.Request(3, asked.file, asked.file.stat().st_mtime_ns)
    golden(evidence.await_dump(again, time.monotonic()))  # an old file is no answer


def test_a_process_without_a_pipe_says_why(golden, tmp_path):
    variables = {evidence.PIPE_VARIABLE: f"{tmp_path}/ask-", evidence.FILE_VARIABLES[0]: f"{tmp_path}/rank-"}
    told = [evidence.request_dump(os.getpid(), 0, own) for own in ({}, variables)]
    (tmp_path / "ask-0.pipe").write_text("")
    told.append(evidence.request_dump(os.getpid(), 0, variables))
    assert (tmp_path / "ask-0.pipe").read_text() == ""
    golden(*(why.replace(str(tmp_path), "TMP") for why in told))


def _program(folder: Path, script: str) -> str:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_py_spys_stacks_are_read_main_thread_first(tmp_path):
    def thread(number: int, name: str, *, gil: bool) -> dict:
        frame = {"name": name, "filename": f"/a/{name}.py", "line": 7, "module": None}
        return {"pid": 9, "os_thread_id": number, "owns_gil": gil, "active": True, "frames": [frame]}

    (tmp_path / "said").write_text(json.dumps([thread(10, "other", gil=False), thread(9, "main", gil=True)]))
    seen = evidence.dump_stacks(_program(tmp_path, f"cat {tmp_path}/said"), 9, time.monotonic() + 5)
    frame = UserFrame("main", "/a/main.py", 7)
    assert seen == evidence.Stacks(("main (main.py:7)",), (("other (other.py:7)",),), True, user_frames=(frame,))


@pytest.mark.parametrize(
    ("path", "is_users"),
    [
        ("/home/u/train.py", True),
        ("/home/u/lib/models/net.py", True),
        ("/usr/lib/python3.12/selectors.py", False),
        ("/opt/uv/cpython-3.13/lib/python3.13t/threading.py", False),
        ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/opt/venv/bin/torchrun", False),
        ("/tmp/torchinductor_u/ab/cab.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
    ],
)
def test_frames_of_the_users_code_are_kept_with_their_path(tmp_path, path, is_users):
    frame = {"name": "f", "filename": path, "line": 7}
    (tmp_path / "said").write_text(json.dumps([{"pid": 9, "os_thread_id": 9, "frames": [frame]}]))
    seen = evidence.dump_stacks(_program(tmp_path, f"cat {tmp_path}/said"), 9, time.monotonic() + 5)
    assert seen.user_frames == ((UserFrame("f", path, 7),) if is_users else ())


SOME_REACH = """import torch.distributed as dist; dist.init_process_group()

def save():
    if dist.get_rank() == 0:
        dist.barrier()

save()
"""


def test_a_pitfall_of_lint_is_told_where_a_rank_is(golden, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SOME_REACH)
    os.utime(script, (0, 0))

    def found(line: int) -> list[Finding]:
        states = {0: ("barrier (distributed_c10d.py:9)",), 1: ("save (train.py:5)",)}
        common = {"pid": os.getpid(), "user_frames": (UserFrame("save", str(script), line),)}
        processes = {rank: ProcessState(pid=9, state="S", stack=stack) for rank, stack in states.items()}
        return [*find_pitfalls([RankState(rank=rank, process=each, **common) for rank, each in processes.items()])]

    (finding,) = found(5)
    assert (finding.code, finding.ranks) == ("LNT018", ())
    golden(finding.title, finding.message, finding.fix)
    assert found(4) == []
    os.utime(script, (time.time() + 9, time.time() + 9))
    assert found(5) == [], "the process runs an earlier version of the file"


def test_py_spy_that_fails_is_quoted_and_one_that_hangs_is_left(golden, tmp_path):
    refused = _program(tmp_path, "echo 'Error: Permission Denied: try sudo' >&2; exit 1")
    assert evidence.dump_stacks(refused, 9, time.monotonic() + 5).is_refused
    hangs = evidence.dump_stacks(_program(tmp_path, "exec sleep 3000"), 9, time.monotonic() + 0.3)
    assert (hangs.main, hangs.is_refused) == ((), False)
    golden(hangs.why_missing)


def test_the_setting_that_refuses_is_named(golden, tmp_path):
    own = os.geteuid()
    for pid, uid in ((7, own), (8, own + 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        why = evidence.refusal(pid, tmp_path)
        golden(why.replace(f"user {own}:", "user OURS:").replace(f"user {own + 1}", "user THEIRS"))
    (tmp_path / "sys" / "kernel" / "yama").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "yama" / "ptrace_scope").write_text("1\n")
    golden(evidence.refusal(7, tmp_path))
