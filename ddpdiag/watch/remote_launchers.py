"""Programs that start ranks on other hosts, or through a daemon, where a look from here does not see them."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.watch.processes import Process

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
_REMOTE = LAUNCHERS | REMOTE_SHELLS
# Programs that train, or start ranks on this host: the words behind them name no launchers.
_TRAINS_HERE = re.compile(r"(python|pypy)[\d.]*t?|torchrun|accelerate|deepspeed|.*\.py")
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
_LARGEST_SCRIPT = 1 << 20
_INLINE = re.compile("-[a-z]*c")  # a shell's option, as -c and -lc


def is_remote(word: str) -> bool:
    """Does this word of a command line name such a program? "/opt/bin/mpiexec.hydra" does."""
    return os.path.basename(word).partition(".")[0] in _REMOTE


def in_script(text: str) -> tuple[int, str] | None:
    """The first line of a shell script that starts such a program, from 1, and which."""
    for number, line in enumerate(text.splitlines(), 1):
        found = next(filter(is_remote, _started(_COMMENT.sub("", line))), None)
        if found is not None:
            return number, os.path.basename(found)
    return None


def _started(line: str) -> Iterator[str]:
    """The words of a line of a script at places where a shell expects a command."""
    expected = True
    for word in _WORD.findall(line):
        if word in _SEPARATORS:
            expected = True
        elif expected and word not in _BEFORE and not _PASSED_OVER.fullmatch(word):
            expected = False
            yield word


def remote_launcher(processes: Sequence[Process]) -> Process | None:
    """Such a program among these processes; a remote shell only where no Python runs beside it."""
    wanted = LAUNCHERS if any(process.is_python for process in processes) else _REMOTE
    names = ((process, {process.program or process.name, process.name}) for process in processes)
    return next((own for own, called in names if any(name.partition(".")[0] in wanted for name in called)), None)


# On the command line --------------------------------------------------------------------------------------------------


def refuse_remote_launchers(command: Sequence[str], *, flight_recorder: bool) -> None:
    """UsageError where the ranks start on other hosts: NCCL ends a rank that cannot make its pipe in the directory.

    A script is searched for launchers by name. Launchers that a program starts show only once it runs.
    """
    found = _named_by(command) if flight_recorder else None
    if found is not None:
        where, launcher = found
        raise UsageError(
            f"--flight-recorder: {where}{launcher} starts ranks on other hosts, where its files do not exist; start "
            f"`ddpdiag watch` on each host: `{launcher} ddpdiag watch --flight-recorder -- COMMAND`"
        )


def _named_by(command: Sequence[str]) -> tuple[str, str] | None:
    """Which remote launcher a command line names, or the script that it starts; and where that is, with ": ".

    Words behind a script, or behind the program that trains, are arguments of it.
    """
    for before, word in pairwise(("", *command)):
        inline = _INLINE.fullmatch(before) is not None
        text = word if inline else _script(word)
        if _TRAINS_HERE.fullmatch(os.path.basename(word)) or (text is not None and "python" in text.partition("\n")[0]):
            return None
        if is_remote(word):
            return "", os.path.basename(word)
        if text is not None:
            found = in_script(text)
            return None if found is None else (f"{readable(word)}:{found[0]}: " if not inline else "", found[1])
    return None


def _script(word: str) -> str | None:
    """The text of a file of the command's that is one."""
    try:
        with open(word, "rb") as file:
            data = file.read(_LARGEST_SCRIPT) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"\0"
    except (OSError, ValueError):
        return None
    return None if b"\0" in data else data.decode(errors="replace")
