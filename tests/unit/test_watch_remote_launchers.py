"""Launchers of ranks on other hosts: on a command line, among the processes."""

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.watch.processes import Process, find_ranks, refuse_remote_launchers, remote_launcher


def refusal(*command: str) -> str:
    with pytest.raises(UsageError) as caught:
        refuse_remote_launchers(command)
    return str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        "srun -n 2 python train.py",
        "/opt/mpi/bin/mpirun.openmpi -np 2 python train.py",
        "env A=1 timeout 1h mpiexec.hydra -n 2 ./train",
        "flux run -n 2 python train.py",
    ],
)
def test_a_far_launcher_on_the_command_line_is_refused(golden, command):
    golden(refusal(*command.split()))


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py --launcher srun",
        "python3.12 -m train mpirun",
        "./train.py srun",
        "bash run.sh",
        "bash -c srun",
    ],
)
def test_words_behind_the_program_that_trains_are_its_own(command):
    refuse_remote_launchers(command.split())


def task(pid: int, parent: int, name: str, environ=None, program: str | None = None) -> Process:
    return Process(pid, parent, name, "S", pid, environ=environ or {}, program=program)


def test_a_far_launcher_among_the_processes_is_found_by_its_program():
    bash, srun, python = task(1, 0, "bash"), task(2, 1, "srun"), task(3, 1, "python3")
    assert remote_launcher([bash, srun]) == srun
    assert remote_launcher([bash, python, task(4, 3, "mpirun", program="prterun")]).pid == 4
    assert remote_launcher([bash, task(2, 1, "ssh")]).name == "ssh"
    assert remote_launcher([bash, python, task(4, 3, "git"), task(5, 4, "ssh")]) is None, "a training may call git"
    assert remote_launcher([bash, python]) is None


def test_the_number_of_a_batch_script_is_no_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "8"}
    assert find_ranks([task(1, 0, "bash", batch), task(2, 1, "srun", batch)]).guessed
    step = batch | {"SLURM_STEP_ID": "0"}
    assert find_ranks([task(1, 0, "bash", step)]).ranks[0].pid == 1
