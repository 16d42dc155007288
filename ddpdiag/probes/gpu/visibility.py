"""Which GPUs a process may use, without asking NVML or CUDA, because either may hang.

The supervisor calls this. Nothing here says that a GPU works: it counts what is named and what the driver lists.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from ddpdiag.probes.host.procfs import ProcGpu, nvidia_gpus
from ddpdiag.probes.host.sysfs import nvidia_functions

_ORDINAL = re.compile(r"[+-]?\d+")


def visible_gpus(env: Mapping[str, str], proc_root: Path) -> int:
    """How many GPUs CUDA would show to a process with this environment; 0 if no driver lists one and none is named.

    Where no driver shows itself in `proc_root` (WSL, some sandboxes), the names in CUDA_VISIBLE_DEVICES are believed.
    """
    present = nvidia_gpus(proc_root)
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return len(present or ())
    return len(gpus_named(named, present))


def gpus_named(value: str, present: Sequence[ProcGpu] | None) -> tuple[str, ...]:
    """The GPUs in a CUDA_VISIBLE_DEVICES, as CUDA reads it (its Programming Guide, and torch.cuda's own parser).

    Each is an index, or a UUID. The first entry that names no GPU ends the list; an entry named twice leaves no GPU at
    all.
    """
    # CUDA enumerates a single MIG instance for a process (NVIDIA's MIG User Guide, "CUDA Device Enumeration").
    if value.startswith("MIG-"):
        return (value.split(",")[0],)
    by_uuid = value.startswith("GPU-")
    named: list[str] = []
    for entry in value.split(","):
        gpu = _by_uuid(entry.strip(), present) if by_uuid else _by_index(entry.strip(), present)
        if gpu is None:
            break
        if gpu in named:
            return ()
        named.append(gpu)
    return tuple(named)


def named_gpus(value: str | None) -> int:
    """How many GPUs a CUDA_VISIBLE_DEVICES means, whether CUDA finds them or not; an entry that is no name ends it.

    More than `visible_gpus` where an index or a UUID is wrong, or named twice.
    """
    if value is None:
        return 0
    if value.startswith("MIG-"):
        return 1
    read = _by_uuid if value.startswith("GPU-") else _by_index
    return sum(1 for _ in takewhile(lambda entry: read(entry.strip(), None) is not None, value.split(",")))


def _by_index(entry: str, present: Sequence[ProcGpu] | None) -> str | None:
    # Like strtoul: "1gpu" is 1, "NoDevFiles" (what Slurm sets for no GPU) is nothing.
    found = _ORDINAL.match(entry)
    index = int(found.group()) if found else -1
    return str(index) if index >= 0 and (present is None or index < len(present)) else None


def _by_uuid(entry: str, present: Sequence[ProcGpu] | None) -> str | None:
    if not entry.startswith("GPU-"):
        return None
    known = [gpu.uuid for gpu in present or () if gpu.uuid]
    # An abbreviation counts when it fits one GPU only. Where a UUID is not known yet, the name is believed.
    if present is None or len(known) < len(present):
        return entry
    fitting = [uuid for uuid in known if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def pci_gpus(sys_root: Path) -> int | None:
    """NVIDIA display and 3D functions on the PCI bus, with or without a driver; None if it cannot be looked at."""
    functions = nvidia_functions(sys_root)
    return None if functions is None else len(functions)


def promised_gpus(env: Mapping[str, str]) -> int | None:
    """How many GPUs launcher or container promise this host, or None if nobody names a number.

    The highest of Slurm's, the container's and CUDA_VISIBLE_DEVICES' counts. NVIDIA_VISIBLE_DEVICES=all is no promise:
    CUDA images carry it, on hosts without a GPU as well.
    """
    container = _container_count(env.get("NVIDIA_VISIBLE_DEVICES", ""))
    return max(_slurm_count(env), container, named_gpus(env.get("CUDA_VISIBLE_DEVICES"))) or None


def _slurm_count(env: Mapping[str, str]) -> int:
    # The step's share first: it may be smaller than the job's.
    if step := env.get("SLURM_STEP_GPUS"):
        return _listed(step)
    if total := env.get("SLURM_GPUS_ON_NODE"):
        return _total(total)
    return _listed(env.get("SLURM_JOB_GPUS", ""))


def _total(value: str) -> int:
    # "4" and "gpu:4" are 4.
    number = value.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _listed(value: str) -> int:
    # "0,2-3" is 3.
    count = 0
    for entry in value.split(","):
        first, _, last = entry.rpartition(":")[2].partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            count += max(0, int(last or first) - int(first) + 1)
    return count


def _container_count(value: str) -> int:
    if value.strip() in ("", "all", "none", "void"):
        return 0
    return sum(bool(entry.strip()) for entry in value.split(","))


def device_index(local_rank: int | None, count: int) -> int | None:
    """The device that a rank takes: cuda:local_rank, in turn where ranks outnumber GPUs; None without a GPU."""
    if count == 0:
        return None
    return 0 if local_rank is None else local_rank % count
