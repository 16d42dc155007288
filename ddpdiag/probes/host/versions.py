"""Versions of what must be alike on every rank."""

import platform
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import read_text


class Versions(Struct, frozen=True, kw_only=True):
    """Version texts; None where torch was built without that part.

    `nccl` is the NCCL that this process has loaded, where torch tells it apart from the one it was compiled against.
    """

    python: str
    torch: str
    cuda: str | None
    hip: str | None
    nccl: str | None


def versions() -> Versions:
    """Versions in this process. Imports torch; ImportError or OSError if it cannot be loaded."""
    import torch

    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=_nccl(),
    )


def _nccl() -> str | None:
    """NCCL's version as "2.29.7", or None if torch was built without it."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    from torch.cuda import nccl

    # torch.cuda.nccl.version() is the compiled one; torch 2.13 has the other, older ones need not.
    version = getattr(dist.ProcessGroupNCCL, "get_runtime_nccl_version", None) or nccl.version
    return ".".join(str(part) for part in version())


def driver_version(proc_root: Path) -> str | None:
    """Version of the NVIDIA kernel module that is loaded, or None if there is none.

    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ..." (or "Open Kernel Module for x86_64").
    """
    content = read_text(proc_root / "driver" / "nvidia" / "version") or ""
    first = content.partition("\n")[0]
    numbers = (word for word in first.split() if word.replace(".", "").isdecimal() and "." in word)
    return next(numbers, None)
