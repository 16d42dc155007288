"""Which process of a rank trains, whatever it is called, and whatever it was before it started another program."""

from pathlib import Path

import pytest
from msgspec import structs

from ddpdiag.watch.processes import KnownProcesses, Process, find_ranks

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


def task(pid: int, parent: int, name: str, state: str = "S") -> Process:
    return Process(pid, parent, name, state, pid)


def trainer(*tasks: Process, **programs: str) -> int:
    known = {int(pid.removeprefix("p")): program for pid, program in programs.items()}
    return find_ranks([structs.replace(one, environ=RANK, program=known.get(one.pid)) for one in tasks]).by_rank[0].pid


SCRIPT, TEE, PYTHON = task(1, 0, "bash"), task(2, 1, "tee"), task(3, 1, "train")


@pytest.mark.parametrize(
    ("tasks", "programs", "pid"),
    [
        # A console script or a renamed process is Python by its program.
        ([task(1, 0, "train"), task(2, 1, "wandb-core")], {"p1": "python3.11", "p2": "wandb-core"}, 1),
        ([task(1, 0, "my job [0]"), task(2, 1, "my job [w]")], {"p1": "pypy3.10", "p2": "pypy3.10"}, 1),
        # Of the processes below a script the only Python trains.
        ([SCRIPT, TEE, PYTHON], {"p1": "bash", "p2": "tee", "p3": "python3.12"}, 3),
        (
            [SCRIPT, TEE, task(3, 1, "numactl"), task(4, 3, "python3")],
            {"p1": "bash", "p2": "tee", "p3": "numactl", "p4": "python3.12"},
            4,
        ),
        ([SCRIPT, PYTHON, task(5, 1, "python3", "Z")], {"p1": "bash", "p3": "python3.12"}, 3),
        ([SCRIPT, task(2, 1, "python3"), task(3, 1, "python3")], {}, 1),
    ],
)
def test_the_only_python_trains_or_else_the_topmost_process(tasks, programs, pid):
    assert trainer(*tasks, **programs) == pid


def test_without_any_python_the_only_child_trains_as_far_as_there_is_one():
    assert trainer(task(1, 0, "sh"), task(2, 1, "train.exe")) == 2
    found = find_ranks([task(1, 0, "sh"), task(2, 1, "rsync")])
    assert (found.by_rank[0].pid, found.are_guessed) == (1, True), "where nothing names a rank it may be anything"


def put(root: Path, env_start: int, program: str, environ: str = "", command: str = "python3 train.py") -> Process:
    """Process 7 of a /proc, as it stands now."""
    folder = root / "7"
    folder.mkdir(exist_ok=True)
    (folder / "environ").write_text(environ)
    (folder / "cmdline").write_text(command.replace(" ", "\0"))
    (folder / "exe").unlink(missing_ok=True)
    (folder / "exe").symlink_to(f"/usr/bin/{program}")
    return Process(7, 1, program, "S", 100, env_start)


def test_the_environment_is_read_again_after_an_exec(tmp_path):
    known = KnownProcesses(tmp_path)
    shell = put(tmp_path, 5000, "bash", "SLURM_PROCID=3\0")
    (seen,) = known.complete([shell])
    assert seen.environ == {"SLURM_PROCID": "3"}
    trains = put(tmp_path, 6000, "python3.11", "SLURM_PROCID=3\0RANK=3\0HOME=/\0")
    (seen,) = known.complete([trains])
    assert seen.environ == {"SLURM_PROCID": "3", "RANK": "3"}
    assert (seen.program, seen.is_python) == ("python3.11", True)


def test_a_process_that_overwrites_its_environment_or_hides_it_stays_what_it_was(tmp_path):
    known = KnownProcesses(tmp_path)
    known.complete([put(tmp_path, 5000, "python3.11", "RANK=3\0")])
    (renamed,) = known.complete([put(tmp_path, 5000, "python3.11", "my job\0")])  # setproctitle
    assert renamed.environ == {"RANK": "3"}
    (hidden,) = known.complete([put(tmp_path, 0, "python3.11", "")])
    assert hidden.environ == {"RANK": "3"}


def test_who_has_overwritten_its_environment_before_it_was_met_is_known_by_its_program(tmp_path):
    known = KnownProcesses(tmp_path)
    (trains,) = known.complete([put(tmp_path, 5000, "python3.11", "my job")])
    assert (trains.environ, trains.program) == ({}, "python3.11")
    found = find_ranks([structs.replace(task(1, 0, "bash"), environ=RANK, program="bash"), trains])
    assert (found.by_rank[0].pid, found.world_size) == (7, 2)


def test_what_multiprocessing_spawned_is_known_by_its_command_line(tmp_path):
    known = KnownProcesses(tmp_path)
    (forked,) = known.complete([put(tmp_path, 5000, "python3.11", "A=1\0")])
    assert not forked.is_spawned
    command = "python3 -c from multiprocessing.spawn import spawn_main"
    (spawned,) = known.complete([put(tmp_path, 6000, "python3.11", "A=1\0", command)])
    assert spawned.is_spawned
