"""The part of the environment that decides how a job communicates. An allow-list: nothing else is ever recorded."""

from collections.abc import Mapping
from pathlib import Path

from ddpdiag.foreign import is_secret, without_secrets
from ddpdiag.probes.files import read_pairs

PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "GLOO_", "UCX_", "FI_", "RCCL_", "HSA_", "PYTORCH_")
NAMES = frozenset(
    {
        # who a process is
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "USE_LIBUV",
        # threads
        "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "KMP_AFFINITY", "GOMP_CPU_AFFINITY",
        # GPUs
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES",
        # which libraries and modules are loaded
        "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX",
    }
)  # fmt: skip

MAX_VALUE = 4096


def is_recorded(name: str) -> bool:
    """May the value of this variable be recorded?"""
    return (name in NAMES or name.startswith(PREFIXES)) and not is_secret(name)


def recorded_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The recorded part of `env`, by name in order, without secrets; values are cut at MAX_VALUE characters."""
    return {name: without_secrets(env[name])[:MAX_VALUE] for name in sorted(env) if is_recorded(name)}


def nccl_files(env: Mapping[str, str], etc: Path = Path("/etc")) -> dict[str, dict[str, str]]:
    """NCCL's configuration files by path, as their variables; only files that set something.

    NCCL reads $NCCL_CONF_FILE, or else ~/.nccl.conf, and then /etc/nccl.conf; "#" starts a comment line. The
    environment wins over both. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    own = env.get("NCCL_CONF_FILE") or (f"{env['HOME']}/.nccl.conf" if env.get("HOME") else "")
    paths = [Path(own)] if own else []
    files = {str(path): _settings(path) for path in (*paths, etc / "nccl.conf")}
    return {path: settings for path, settings in files.items() if settings}


def _settings(path: Path) -> dict[str, str]:
    pairs = read_pairs(path, "=")
    return {name: without_secrets(value)[:MAX_VALUE] for name, value in pairs.items() if is_recorded(name)}
