"""The GPUs that a process may use, found without NVML and CUDA, because either may hang.

The supervisor calls these functions. None of them shows that a GPU works: they count the GPUs that variables name, that
the driver lists in /proc, and that are on the PCI bus, with or without a driver.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import PROC, names_in, open_files, read_pairs, read_text

DEV = Path("/dev")
# WSL2 shows Windows' driver here: libraries in lib, or in a container in a folder of drivers (nv_dispi.inf_..., say).
WSL = Path("/usr/lib/wsl")
# Device files of NVIDIA; AMD (ROCm opens kfd and a render node); Intel; the kernel's accel class; WSL2.
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD", "/dev/accel", "/dev/dxg")
NVIDIA = "0x10de"
# VGA and 3D controllers; an NVSwitch is a bridge (0x0680), a GPU's sound function 0x0403.
GPU_CLASSES = ("0x0300", "0x0302")
_ORDINAL = re.compile(r"[+-]?\d+")


class ProcGpu(Struct, frozen=True):
    """A GPU of the loaded driver. `uuid` is None until the driver has opened the card; `sliced` says that MIG is on."""

    pci: str
    uuid: str | None
    sliced: bool = False


class PciFunction(Struct, frozen=True):
    """A PCI function, such as 0000:1b:00.0; `driver` is the kernel driver bound to it, None if there is none."""

    address: str
    driver: str | None


def nvidia_gpus(root: Path, dev: Path = DEV) -> tuple[ProcGpu, ...] | None:
    """List the GPUs of the loaded NVIDIA driver that this process may open, in bus order; None without a driver.

    A container may list all GPUs of the host (CDI does not hide them) but have device files of its GPUs only. In a
    device cgroup (Slurm's ConstrainDevices) all files exist, but some cannot be opened. Both kinds are left out. If no
    device file exists, no GPU was opened yet, and all count.
    """
    listed = _proc_gpus(root)
    if listed is None:
        return None
    files = [(gpu, None if number is None else dev / f"nvidia{number}") for gpu, number in listed]
    if not any(file is None or file.exists() for _, file in files):
        return tuple(gpu for gpu, _ in files)
    # access(2) respects the device cgroup, too (inode_permission in Linux' fs/namei.c). open(2) would start a GPU that
    # no process uses, which takes a second or may hang for ever.
    return tuple(gpu for gpu, file in files if file is None or os.access(file, os.R_OK | os.W_OK))


def holds_gpu(pid: int, root: Path = PROC) -> bool | None:
    """Whether a process has a file of a GPU or accelerator open; None if its open files cannot be seen."""
    try:
        return any(path.startswith(_GPU_FILES) for path in open_files(root / str(pid)))
    except OSError:
        return None


def withheld_gpus(root: Path, dev: Path = DEV) -> int:
    """The number of GPUs that the driver lists but that this container or cgroup may not open."""
    return len(_proc_gpus(root) or ()) - len(nvidia_gpus(root, dev) or ())


def _proc_gpus(root: Path) -> list[tuple[ProcGpu, str | None]] | None:
    """The GPUs that the driver lists in /proc, with the numbers of their device files."""
    nvidia = root / "driver" / "nvidia"
    names = names_in(nvidia / "gpus")
    if names is None:
        return None
    gpus = []
    for name in names:
        facts = read_pairs(nvidia / "gpus" / name / "information", ":")
        uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor")
        # The UUID of a card that was never opened is "GPU-????????-????-...".
        known = uuid if uuid and "?" not in uuid else None
        # Instances of MIG are gi1 and so on (NVIDIA's MIG User Guide, "Device Nodes and Capabilities").
        parts = names_in(nvidia / "capabilities" / f"gpu{minor}" / "mig") or ()
        sliced = any(part.startswith("gi") for part in parts)
        gpus.append((ProcGpu(name, known, sliced), minor))
    return gpus


def has_wsl_gpu(dev: Path = DEV, wsl: Path = WSL) -> bool:
    """Whether WSL2 shows an NVIDIA GPU: /dev/dxg exists for every make, so Windows' driver files must be NVIDIA's."""
    if not (dev / "dxg").exists():
        return False
    libraries, drivers = names_in(wsl / "lib") or (), names_in(wsl / "drivers") or ()
    return any(name.startswith("libcuda.so") for name in libraries) or any(n.startswith("nv_") for n in drivers)


def nvidia_functions(root: Path) -> tuple[PciFunction, ...] | None:
    """List NVIDIA's display and 3D functions in bus order; None if the PCI bus cannot be read.

    A kernel without PCI has /sys/bus but no /sys/bus/pci: the bus counts as empty, not as unknown.
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
    """Count the GPUs that CUDA would show to a process with this environment; 0 if none is listed or named.

    If `proc_root` shows no driver (WSL2, some sandboxes), every name in CUDA_VISIBLE_DEVICES counts. If the variable is
    unset, too, WSL2 counts as one GPU: only NVML knows of more. If all GPUs are cut into slices (MIG), CUDA shows one
    slice only (NVIDIA's MIG User Guide, "CUDA Device Enumeration").
    """
    present, named = nvidia_gpus(proc_root, dev), env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len(gpus_named(named, present))
    if present is None:
        return int(has_wsl_gpu(dev, wsl))
    return 1 if present and all(gpu.sliced for gpu in present) else len(present)


def gpus_named(value: str, present: Sequence[ProcGpu] | None) -> tuple[str, ...]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names, read as CUDA does (its Programming Guide, and torch.cuda's parser).

    Each entry is an index or a UUID. The first entry that names no GPU ends the list. If an entry occurs twice, there
    is no GPU at all.
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
    """The number of GPUs that a CUDA_VISIBLE_DEVICES names, whether or not CUDA finds them."""
    return 0 if value is None else len(gpus_named(value, None))


def _by_index(entry: str, present: Sequence[ProcGpu] | None) -> str | None:
    # As strtoul reads it: "1gpu" is 1, "NoDevFiles" (which Slurm sets for no GPU) is no number.
    found = _ORDINAL.match(entry)
    index = int(found.group()) if found else -1
    return str(index) if index >= 0 and (present is None or index < len(present)) else None


def _by_uuid(entry: str, present: Sequence[ProcGpu] | None) -> str | None:
    if not entry.startswith("GPU-"):
        return None
    known = [gpu.uuid for gpu in present or () if gpu.uuid]
    # An abbreviation must fit exactly one GPU. If a UUID is not known yet, every name counts without proof.
    if present is None or len(known) < len(present):
        return entry
    fitting = [uuid for uuid in known if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def pci_gpus(sys_root: Path) -> int | None:
    """The number of NVIDIA's display and 3D functions on the PCI bus; None if the bus cannot be read."""
    functions = nvidia_functions(sys_root)
    return None if functions is None else len(functions)


def promised_gpus(env: Mapping[str, str]) -> int | None:
    """The number of GPUs that the launcher or container promises to this host; None without a promise.

    This is the highest count of Slurm's variables, the container's and CUDA_VISIBLE_DEVICES. NVIDIA_VISIBLE_DEVICES=all
    is no promise: CUDA images set it, even on hosts without a GPU.
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
    """The index of the device that a rank takes: its local rank, modulo the number of GPUs; None without a GPU."""
    if count == 0:
        return None
    return 0 if local_rank is None else local_rank % count
