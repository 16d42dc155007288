"""Programs that start ranks on other hosts, or through a daemon, where a look from here does not see them."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from ddpdiag.watch.processes import Task, is_python

# Slurm; Open MPI and PRRTE; MPICH, Intel MPI, MVAPICH; Flux; LSF and CORAL; Cray ALPS and PALS; TACC; PBS; Tianhe; CEA;
# Horovod. ReFrame's list of launchers (reframe/core/launchers) has most.
LAUNCHERS = frozenset(
    {
        "srun", "mpirun", "mpiexec", "orterun", "prterun", "prun", "mpirun_rsh", "flux", "jsrun", "lrun", "blaunch",
        "aprun", "ibrun", "pbsdsh", "yhrun", "ccc_mprun", "horovodrun",
    }
)  # fmt: skip
# These may as well do something else beside a training, as git does with ssh.
REMOTE_SHELLS = frozenset({"ssh", "rsh", "pdsh", "clush"})
_FAR = LAUNCHERS | REMOTE_SHELLS
_NEAR = re.compile(r"(python|pypy)[\d.]*t?|torchrun|accelerate|deepspeed|.*\.py")
_WORD = re.compile(r"[;&|(){}`]|[^\s;&|(){}`]+")
_SEPARATORS = ";&|(){}`"
# Behind these a shell still expects a command, and behind their options, numbers and variables.
_BEFORE = frozenset(
    {
        "if", "then", "elif", "else", "while", "until", "do", "!", "$", "exec", "time", "timeout", "nohup", "nice",
        "env", "eval", "command",
    }
)  # fmt: skip
_PASSED_OVER = re.compile(r"-.*|[\d.]+[smhd]?|[A-Za-z_]\w*=.*")
_COMMENT = re.compile(r"(^|\s)#.*")


def is_far(word: str) -> bool:
    """Does this word of a command line name such a program? "/opt/bin/mpiexec.hydra" does."""
    return os.path.basename(word).partition(".")[0] in _FAR


def is_near(word: str) -> bool:
    """Is it a program that trains, or starts ranks on this host, whose own words say nothing of launchers?"""
    return _NEAR.fullmatch(os.path.basename(word)) is not None


def in_script(text: str) -> tuple[int, str] | None:
    """The first line of a shell script that starts such a program, from 1, and which."""
    for number, line in enumerate(text.splitlines(), 1):
        found = next(filter(is_far, _started(_COMMENT.sub("", line))), None)
        if found is not None:
            return number, os.path.basename(found)
    return None


def _started(line: str) -> Iterator[str]:
    """The words of a line of a script that stand where a shell expects a command."""
    expected = True
    for word in _WORD.findall(line):
        if word in _SEPARATORS:
            expected = True
        elif expected and word not in _BEFORE and not _PASSED_OVER.fullmatch(word):
            expected = False
            yield word


def far_process(tasks: Sequence[Task], programs: Mapping[int, str]) -> Task | None:
    """Such a program among these processes; a remote shell only where no Python runs beside it."""
    wanted = LAUNCHERS if any(is_python(task, programs) for task in tasks) else _FAR
    for task in tasks:
        names = {programs.get(task.pid, task.name), task.name}
        if any(name.partition(".")[0] in wanted for name in names):
            return task
    return None
