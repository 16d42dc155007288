"""Settings that must be the same on all ranks: environment variables (also Slurm's) and versions of libraries.

Only variables on an allow-list are recorded.
"""

import platform
import re
from collections.abc import Iterable, Mapping
from itertools import islice, product
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import read_pairs, read_text
from ddpdiag.sanitize import is_secret, without_secrets

RECORDED_PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "GLOO_", "UCX_", "FI_", "RCCL_", "HSA_", "PYTORCH_")
RECORDED_NAMES = frozenset(
    {
        # identity of the process
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "USE_LIBUV",
        # threads
        "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "KMP_AFFINITY", "GOMP_CPU_AFFINITY",
        # GPUs
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES",
        # search paths of libraries and modules
        "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX",
    }
)  # fmt: skip

MAX_VALUE_CHARACTERS = 4096


def is_recorded(name: str) -> bool:
    """Whether the value of this variable may be recorded."""
    return (name in RECORDED_NAMES or name.startswith(RECORDED_PREFIXES)) and not is_secret(name)


def recorded_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `env` that may be recorded, sorted by name, without secrets and with shortened values."""
    return _values(env, filter(is_recorded, sorted(env)))


def _values(env: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: without_secrets(env[name])[:MAX_VALUE_CHARACTERS] for name in names}


def nccl_files(env: Mapping[str, str], etc: Path = Path("/etc")) -> dict[str, dict[str, str]]:
    """Read NCCL's configuration files. Returns the recorded variables of each file by its path, if it has any.

    NCCL reads $NCCL_CONF_FILE, or else ~/.nccl.conf, and then /etc/nccl.conf. A line that starts with "#" is a comment.
    The environment overrides both files. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    user_file = env.get("NCCL_CONF_FILE") or (f"{env['HOME']}/.nccl.conf" if env.get("HOME") else "")
    paths = [Path(user_file)] if user_file else []
    files = {str(path): read_pairs(path, "=") for path in (*paths, etc / "nccl.conf")}
    known = {path: _values(pairs, filter(is_recorded, pairs)) for path, pairs in files.items()}
    return {path: settings for path, settings in known.items() if settings}


# The allow-list of check LCH004: variables of srun(1) and sbatch(1), and torchrun's number of agents.
SLURM_VARIABLES = frozenset(
    {
        "SLURM_JOB_ID", "SLURM_JOB_END_TIME", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS",
        "SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "GROUP_WORLD_SIZE",
    }
)  # fmt: skip

# slurm.h: SLURM_INTERACTIVE_STEP is 0xfffffffa, SLURM_BATCH_SCRIPT 0xfffffffb, SLURM_EXTERN_CONT 0xfffffffc;
# SLURM_MAX_NORMAL_STEP_ID is 0xfffffff0.
FIRST_PSEUDO_STEP = 0xFFFFFFF0
# Above the number of hosts of any cluster. A longer list is rejected, since it would only fill the memory.
MAX_HOSTS = 1 << 16


def is_pseudo_step(env: Mapping[str, str]) -> bool:
    """Whether this process runs in a Slurm job, but outside of srun's steps: in a batch script or salloc's shell."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) >= FIRST_PSEUDO_STEP


def slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The SLURM_VARIABLES that `env` has, sorted by name, without secrets and with shortened values."""
    return _values(env, sorted(SLURM_VARIABLES & env.keys()))


def job_step_id(env: Mapping[str, str]) -> str:
    """The id of the Slurm step ("12.0") or, outside of steps, of the job ("12"); empty without a numeric job id."""
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    if not re.fullmatch(r"[0-9]{1,10}", job):
        return ""
    is_step = re.fullmatch(r"[0-9]{1,10}", step) and int(step) < FIRST_PSEUDO_STEP
    return f"{job}.{step}" if is_step else job


def tasks_per_node(text: str) -> tuple[tuple[int, int], ...]:
    """Parse SLURM_STEP_TASKS_PER_NODE to pairs (tasks, nodes): "2(x3),1" is ((2, 3), (1, 1)). Empty for other forms."""
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in text.split(",")]
    found = tuple((int(part[1]), int(part[2] or 1)) for part in parts if part)
    return found if len(found) == len(parts) else ()


def tasks_on_node(per_node: tuple[tuple[int, int], ...], node: int) -> int:
    """The number of tasks on a node, which is numbered from 0; 0 if there is no such node."""
    for count, repeated in per_node:
        if node < repeated:
            return count
        node -= repeated
    return 0


def expand_hosts(nodelist: str) -> tuple[str, ...]:
    """Expand "z[9,1-3],a1" to z9 z1 z2 z3 a1, in Slurm's order. Empty for another form, or above MAX_HOSTS."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist.strip()):
        pieces = re.split(r"\[([^\]]*)\]", part)  # every second piece is the content of brackets
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        hosts += map("".join, islice(product(*choices), MAX_HOSTS + 1))
        if not all(choices) or len(hosts) > MAX_HOSTS:
            return ()
    return tuple(hosts)


def _numbers(text: str) -> list[str]:
    """Expand "08-10,12" to 08, 09, 10, 12; empty if `text` has another form."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += (f"{number:0{len(match[1])}}" for number in range(first, min(last, first + MAX_HOSTS) + 1))
    return numbers


class Versions(Struct, frozen=True, kw_only=True):
    """The versions of Python, torch and torch's libraries; None if torch was built without that library.

    `nccl` is the NCCL that this process has loaded. An older torch may report only the NCCL that it was compiled with.
    """

    python: str
    torch: str
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None


def versions() -> Versions:
    """Import torch, and return the versions in this process. ImportError or OSError if torch cannot be loaded."""
    import torch
    import torch.distributed as dist

    loaded = None
    if dist.is_available() and dist.is_nccl_available():
        from torch.cuda import nccl

        # torch.cuda.nccl.version() is the compiled version. torch 2.13 can also report the loaded version.
        version = getattr(dist.ProcessGroupNCCL, "get_runtime_nccl_version", None) or nccl.version
        loaded = ".".join(map(str, version()))
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=loaded,
    )


def driver_version(proc_root: Path) -> str | None:
    """Read the version of the loaded NVIDIA kernel module; None if there is none.

    The line is "NVRM version: NVIDIA UNIX x86_64 Kernel Module 535.104.05 ..." (or "Open Kernel Module for x86_64").
    """
    content = read_text(proc_root / "driver" / "nvidia" / "version") or ""
    first = content.partition("\n")[0]
    numbers = (word for word in first.split() if word.replace(".", "").isdecimal() and "." in word)
    return next(numbers, None)
