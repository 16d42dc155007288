"""Launchers of ranks on other hosts: on a command line, in a script, among the processes."""

import pytest

from ddpdiag.errors import UsageError
from ddpdiag.watch.processes import Process, find_ranks, in_script, refuse_remote_launchers, remote_launcher


def refusal(*command: str) -> str:
    with pytest.raises(UsageError) as caught:
        refuse_remote_launchers(command, flight_recorder=True)
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
    ["torchrun train.py --launcher srun", "python3.12 -m train mpirun", "./train.py srun", "bash no-such-file"],
)
def test_words_behind_the_program_that_trains_are_its_own(command):
    refuse_remote_launchers(command.split(), flight_recorder=True)


@pytest.mark.parametrize(
    "line",
    [
        "srun python train.py",
        "  exec /usr/bin/srun -n 2 train",
        "export A=1; OMP_NUM_THREADS=1 srun train",
        "cd x && time srun \\",
        "if true; then srun train; fi",
        "out=$(srun hostname)",
        "(srun train | tee log)",
    ],
)
def test_a_line_of_a_script_that_starts_it_is_found(line):
    assert in_script(f"#!/bin/bash\n# srun is not started here\n{line}\n") == (3, "srun")


@pytest.mark.parametrize(
    "line", ["echo srun is there", "python train.py --launcher srun", "which mpirun", "srun_me", "# ; srun"]
)
def test_a_line_that_only_names_it_is_not(line):
    assert in_script(f"{line}\n") is None


def test_a_script_that_calls_one_is_refused(golden, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\nmodule load x\nsrun python train.py\n")
    for command in (["bash", "-e", str(script), "8"], [str(script)], ["bash", "-lc", "cd x; mpirun train"]):
        golden(refusal(*command).replace(str(tmp_path), "TMP"))
    refuse_remote_launchers([str(script)], flight_recorder=False)
    script.write_text("#!/bin/bash\npython train.py\n")
    refuse_remote_launchers([str(script), "srun"], flight_recorder=True)
    refuse_remote_launchers(["bash", "-c", "python train.py", "srun"], flight_recorder=True)
    script.write_text("#!/usr/bin/env python3\nsrun\n")
    refuse_remote_launchers([str(script)], flight_recorder=True)


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
