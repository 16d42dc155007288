"""The backend that --backend names: does torch know it, and can it run here?"""

import os
from importlib.metadata import PackageNotFoundError, entry_points, version

from ddpdiag.errors import UsageError, nearest
from ddpdiag.probes.gpu.visibility import visible_gpus
from ddpdiag.probes.host.kernel import proc_root

# torch.distributed.Backend.backend_list of torch 2.6 to 2.15, and names that its CUDA builds register.
_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "nccl2", "nccl-legacy", "nccl-lazy")


def check_backend(name: str) -> None:
    """UsageError for a backend that torch cannot know.

    Others come with packages that torch loads by itself, since they declare an entry point
    (docs.pytorch.org/tutorials/unstable/python_extension_autoload.html).
    """
    wanted = name.strip().lower()
    if wanted in _BACKENDS or (wanted and ":" in wanted) or (wanted and entry_points(group="torch.backends")):
        return
    near = nearest(wanted, _BACKENDS)
    raise UsageError(f"--backend {name}: expected a backend that torch knows, such as nccl or gloo{near}")


def refuse_nccl_without_gpus(backend: str) -> None:
    """UsageError now, rather than from every rank."""
    if (reason := nccl_without_gpus(backend)) is not None:
        raise UsageError(reason)


def nccl_without_gpus(backend: str) -> str | None:
    """Why nccl cannot run here, and what to change; None for another backend, or where a GPU is visible."""
    if backend.strip().lower() != "nccl" or visible_gpus(os.environ, proc_root(os.environ)):
        return None
    build = torch_version()
    if build is not None and build.endswith("+cpu"):
        return (
            f"--backend nccl: no GPU is visible on this host, and torch {build} is a CPU build; "
            "install a CUDA build on a host with GPUs, or use --backend gloo"
        )
    return (
        "--backend nccl: no GPU is visible on this host; make its GPUs visible (CUDA_VISIBLE_DEVICES), or use "
        "--backend gloo"
    )


def torch_version() -> str | None:
    """Such as "2.13.0+cpu", without importing torch; None where it is not installed as a package."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
