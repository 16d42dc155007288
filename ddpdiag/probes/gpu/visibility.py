"""The GPUs that a process may use, found without asking NVML or CUDA, because either may hang.

The supervisor calls this. Nothing here says that a GPU works: it counts what is named, what the driver lists in /proc,
and what is on the PCI bus, with or without a driver.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import PROC, names_in, open_files, read_pairs, read_text

DEV = Path("/dev")
# WSL2 has Windows' driver here: its libraries in lib, or in a container in a folder of drivers (nv_dispi.inf_..., say).
WSL = Path("/usr/lib/wsl")
# NVIDIA; AMD (ROCm opens kfd and a render node); Intel; accelerators of the kernel's accel class; WSL2.
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD", "/dev/accel", "/dev/dxg")
NVIDIA = "0x10de"
# VGA and 3D controllers; an NVSwitch is a bridge (0x0680), a GPU's sound function 0x0403.
GPU_CLASSES = ("0x0300", "0x0302")
_ORDINAL = re.compile(r"[+-]?\d+")


class ProcGpu(Struct, frozen=True):
    """A GPU that the loaded driver drives. `uuid` is None while the driver has not asked the card; `sliced`: it is cut
    into slices (MIG)."""

    pci: str
    uuid: str | None
    sliced: bool = False


class PciFunction(Struct, frozen=True):
    """A PCI function, such as 0000:1b:00.0; `driver` is the kernel driver bound to it, None when there is none."""

    address: str
    driver: str | None


def nvidia_gpus(root: Path, dev: Path = DEV) -> tuple[ProcGpu, ...] | None:
    """GPUs of the loaded NVIDIA driver in bus order, or None if no driver shows itself.

    A container may list all GPUs of the host (CDI does not hide them) and hold the device files of its own only; in a
    device cgroup (Slurm's ConstrainDevices) all files are there, and some cannot be opened. Both kinds are left out.
    Without any such file nothing was opened yet, and all count.
    """
    listed = _proc_gpus(root)
    if listed is None:
        return None
    files = [(gpu, None if number is None else dev / f"nvidia{number}") for gpu, number in listed]
    if not any(file is None or file.exists() for _, file in files):
        return tuple(gpu for gpu, _ in files)
    # access(2) asks the device cgroup, too (inode_permission in Linux' fs/namei.c). open(2) would start a GPU that no
    # process uses, for a second or for ever.
    return tuple(gpu for gpu, file in files if file is None or os.access(file, os.R_OK | os.W_OK))


def holds_gpu(pid: int, root: Path = PROC) -> bool | None:
    """Whether a process has a file of a GPU or another accelerator open; None where its open files cannot be seen."""
    try:
        return any(path.startswith(_GPU_FILES) for path in open_files(root / str(pid)))
    except OSError:
        return None


def withheld_gpus(root: Path, dev: Path = DEV) -> int:
    """The number of GPUs that the driver lists and this container or cgroup was not given."""
    return len(_proc_gpus(root) or ()) - len(nvidia_gpus(root, dev) or ())


def _proc_gpus(root: Path) -> list[tuple[ProcGpu, str | None]] | None:
    """GPUs, with the numbers of their device files."""
    nvidia = root / "driver" / "nvidia"
    names = names_in(nvidia / "gpus")
    if names is None:
        return None
    gpus = []
    for name in names:
        facts = read_pairs(nvidia / "gpus" / name / "information", ":")
        uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor")
        # A card that was never opened says "GPU-????????-????-...".
        known = uuid if uuid and "?" not in uuid else None
        # Instances of MIG are gi1 and so on (NVIDIA's MIG User Guide, "Device Nodes and Capabilities").
        parts = names_in(nvidia / "capabilities" / f"gpu{minor}" / "mig") or ()
        sliced = any(part.startswith("gi") for part in parts)
        gpus.append((ProcGpu(name, known, sliced), minor))
    return gpus


def has_wsl_gpu(dev: Path = DEV, wsl: Path = WSL) -> bool:
    """Whether WSL2 shows a GPU of NVIDIA: /dev/dxg may be one of another make, and Windows' driver shows which."""
    if not (dev / "dxg").exists():
        return False
    libraries, drivers = names_in(wsl / "lib") or (), names_in(wsl / "drivers") or ()
    return any(name.startswith("libcuda.so") for name in libraries) or any(n.startswith("nv_") for n in drivers)


def nvidia_functions(root: Path) -> tuple[PciFunction, ...] | None:
    """Display and 3D functions of NVIDIA, in bus order, or None if the bus cannot be looked at.

    A kernel without PCI has /sys/bus but no /sys/bus/pci: that is an empty bus, not an unknown one.
    """
    folder, buses = root / "bus" / "pci" / "devices", names_in(root / "bus")
    names = None if buses is None else names_in(folder) if "pci" in buses else ()
    if names is None:
        return None
    devices = [folder / name for name in names]
    identities = [(device, read_text(device / "vendor"), read_text(device / "class")) for device in devices]
    # Present, but neither file readable: it could be a GPU.
    if any(None in identity and identity[0].exists() for identity in identities):
        return None
    functions = []
    for device, vendor, kind in identities:
        if vendor == NVIDIA and kind is not None and kind.startswith(GPU_CLASSES):
            driver = None
            with contextlib.suppress(OSError):
                driver = (device / "driver").readlink().name
            functions.append(PciFunction(device.name, driver))
    return tuple(functions)


def visible_gpus(env: Mapping[str, str], proc_root: Path, dev: Path = DEV, wsl: Path = WSL) -> int:
    """The number of GPUs that CUDA would show to a process with this environment.

    It is 0 if no driver lists one and none is named.

    Where no driver shows itself in `proc_root` (WSL2, some sandboxes), the names in CUDA_VISIBLE_DEVICES are believed;
    without a name, WSL2 has one GPU: NVML alone knows of more. Of GPUs that are all cut into slices (MIG), CUDA shows
    one slice only (NVIDIA's MIG User Guide, "CUDA Device Enumeration").
    """
    present, named = nvidia_gpus(proc_root, dev), env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len(gpus_named(named, present))
    if present is None:
        return int(has_wsl_gpu(dev, wsl))
    return 1 if present and all(gpu.sliced for gpu in present) else len(present)


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
    """The number of GPUs that a CUDA_VISIBLE_DEVICES names, whether CUDA finds them or not."""
    return 0 if value is None else len(gpus_named(value, None))


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
    """The number of GPUs that launcher or container promise this host, or None without a promise.

    The highest of Slurm's, the container's and CUDA_VISIBLE_DEVICES' counts. NVIDIA_VISIBLE_DEVICES=all is no promise:
    CUDA images carry it, on hosts without a GPU as well.
    """
    container = env.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    count = 0 if container in ("all", "none", "void") else sum(bool(entry.strip()) for entry in container.split(","))
    # The step's share first: it may be smaller than the job's.
    if step := env.get("SLURM_STEP_GPUS"):
        slurm = _listed(step)
    elif total := env.get("SLURM_GPUS_ON_NODE"):
        number = total.rpartition(":")[2]  # "4" and "gpu:4" are 4
        slurm = int(number) if number.isdecimal() else 0
    else:
        slurm = _listed(env.get("SLURM_JOB_GPUS", ""))
    return max(slurm, count, named_gpus(env.get("CUDA_VISIBLE_DEVICES"))) or None


def _listed(value: str) -> int:
    # "0,2-3" is 3.
    count = 0
    for entry in value.split(","):
        first, _, last = entry.rpartition(":")[2].partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            count += max(0, int(last or first) - int(first) + 1)
    return count


def device_index(local_rank: int | None, count: int) -> int | None:
    """The device that a rank takes: cuda:local_rank, in turn where ranks outnumber GPUs; None without a GPU."""
    if count == 0:
        return None
    return 0 if local_rank is None else local_rank % count
