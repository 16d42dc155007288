"""The GPUs that a process may use, found without NVML and CUDA, because either may hang.

The supervisor calls these functions. They count the GPUs that variables name, that the driver lists in /proc, or that
are on the PCI bus, even without a driver. They do not show that a GPU works.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ddpdiag.probes.host.kernel import PROC, names_in, open_files, read_pairs, read_text

DEV = Path("/dev")
# WSL2 shows Windows' driver in this folder: libraries in lib, or, in a container, in drivers/nv_dispi.inf_... .
WSL = Path("/usr/lib/wsl")
# Device files of NVIDIA; AMD (ROCm opens kfd and a render node); Intel; the kernel's accel class; WSL2.
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD", "/dev/accel", "/dev/dxg")
NVIDIA = "0x10de"
# The PCI classes of VGA and 3D controllers. An NVSwitch has another class (0x0680), a GPU's sound function 0x0403.
GPU_CLASSES = ("0x0300", "0x0302")
_ORDINAL = re.compile(r"[+-]?\d+")


class ProcGpu(Struct, frozen=True):
    """A GPU that the loaded driver lists. `uuid` is None until the driver has opened the card. `is_mig`: MIG is on."""

    pci: str
    uuid: str | None
    is_mig: bool = False


class PciFunction(Struct, frozen=True):
    """A PCI function, such as 0000:1b:00.0; `driver` is the kernel driver bound to it, None if there is none."""

    address: str
    driver: str | None


def openable_gpus(root: Path, dev: Path = DEV) -> tuple[ProcGpu, ...] | None:
    """List the GPUs of the loaded NVIDIA driver that this process may open, in bus order; None without a driver.

    In a container, the driver may list all GPUs of the host (CDI does not hide them), but only the container's GPUs
    have device files. In a device cgroup (Slurm's ConstrainDevices), all files exist, but some cannot be opened. GPUs
    without a usable file are omitted. If no device file exists, no GPU has been opened yet, and all are returned.
    """
    listed = _proc_gpus(root)
    if listed is None:
        return None
    files = [(gpu, None if number is None else dev / f"nvidia{number}") for gpu, number in listed]
    if not any(file is None or file.exists() for _, file in files):
        return tuple(gpu for gpu, _ in files)
    # access(2) also respects the device cgroup (inode_permission in Linux' fs/namei.c). open(2) would start an unused
    # GPU, which takes a second or may hang for ever.
    return tuple(gpu for gpu, file in files if file is None or os.access(file, os.R_OK | os.W_OK))


def holds_gpu(pid: int, root: Path = PROC) -> bool | None:
    """Whether a process has a GPU's or accelerator's device file open; None if its open files cannot be read."""
    try:
        return any(path.startswith(_GPU_FILES) for path in open_files(root / str(pid)))
    except OSError:
        return None


def withheld_gpu_count(root: Path, dev: Path = DEV) -> int:
    """The number of GPUs that the driver lists, but that this process may not open in its container or cgroup."""
    return len(_proc_gpus(root) or ()) - len(openable_gpus(root, dev) or ())


def _proc_gpus(root: Path) -> list[tuple[ProcGpu, str | None]] | None:
    """Read the GPUs that the driver lists in /proc, and the numbers of their device files; None without a driver."""
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
    """Whether WSL2 shows an NVIDIA GPU: /dev/dxg exists for GPUs of any maker, so NVIDIA's driver must exist, too."""
    if not (dev / "dxg").exists():
        return False
    libraries, drivers = names_in(wsl / "lib") or (), names_in(wsl / "drivers") or ()
    return any(name.startswith("libcuda.so") for name in libraries) or any(n.startswith("nv_") for n in drivers)


def nvidia_functions(root: Path) -> tuple[PciFunction, ...] | None:
    """List NVIDIA's display and 3D functions, which are GPUs, in bus order; None if the PCI bus cannot be read.

    On a kernel without PCI (/sys/bus exists, but no /sys/bus/pci) the result is empty, not None.
    """
    folder, buses = root / "bus" / "pci" / "devices", names_in(root / "bus")
    names = None if buses is None else names_in(folder) if "pci" in buses else ()
    if names is None:
        return None
    devices = [folder / name for name in names]
    identities = [(device, read_text(device / "vendor"), read_text(device / "class")) for device in devices]
    # A device whose files cannot be read could be a GPU.
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


def visible_gpu_count(env: Mapping[str, str], proc_root: Path, dev: Path = DEV, wsl: Path = WSL) -> int:
    """Count the GPUs that CUDA would show to a process with this environment.

    If `proc_root` shows no driver (WSL2, some sandboxes), all entries of CUDA_VISIBLE_DEVICES count. If the variable is
    not set either, WSL2 counts as one GPU: only NVML knows of more. If all GPUs are in MIG mode, CUDA shows one slice
    (NVIDIA's MIG User Guide, "CUDA Device Enumeration").
    """
    present, named = openable_gpus(proc_root, dev), env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len(parse_visible_devices(named, present))
    if present is None:
        return int(has_wsl_gpu(dev, wsl))
    return 1 if present and all(gpu.is_mig for gpu in present) else len(present)


def parse_visible_devices(value: str, present: Sequence[ProcGpu] | None) -> tuple[str, ...]:
    """Parse a value of CUDA_VISIBLE_DEVICES as CUDA does (CUDA's Programming Guide, and the parser of torch.cuda).

    Returns the indices or UUIDs up to the first entry that names no GPU of `present` (None: GPUs are not known). If two
    entries name one GPU, the result is empty.
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


def named_gpu_count(value: str | None) -> int:
    """The number of GPUs that a value of CUDA_VISIBLE_DEVICES names, whether or not the GPUs exist."""
    return 0 if value is None else len(parse_visible_devices(value, None))


def _by_index(entry: str, present: Sequence[ProcGpu] | None) -> str | None:
    # Parsed as strtoul does: "1gpu" is 1, and "NoDevFiles" (which Slurm sets for no GPU) is not a number.
    found = _ORDINAL.match(entry)
    index = int(found.group()) if found else -1
    return str(index) if index >= 0 and (present is None or index < len(present)) else None


def _by_uuid(entry: str, present: Sequence[ProcGpu] | None) -> str | None:
    if not entry.startswith("GPU-"):
        return None
    known = [gpu.uuid for gpu in present or () if gpu.uuid]
    # A shortened UUID must match exactly one GPU. If some UUID is not known yet, every entry is accepted.
    if present is None or len(known) < len(present):
        return entry
    fitting = [uuid for uuid in known if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def pci_gpu_count(sys_root: Path) -> int | None:
    """The number of NVIDIA GPUs on the PCI bus, even without a driver; None if the bus cannot be read."""
    functions = nvidia_functions(sys_root)
    return None if functions is None else len(functions)


def promised_gpu_count(env: Mapping[str, str]) -> int | None:
    """The number of GPUs that environment variables promise to this host; None if no variable does.

    It is the highest number in Slurm's variables, NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES.
    NVIDIA_VISIBLE_DEVICES=all is no promise: CUDA images set it, even on hosts without a GPU.
    """
    container = env.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    count = 0 if container in ("all", "none", "void") else sum(bool(entry.strip()) for entry in container.split(","))
    # The step's share first: it may be smaller than the job's.
    if step := env.get("SLURM_STEP_GPUS"):
        slurm = _count_listed(step)
    elif total := env.get("SLURM_GPUS_ON_NODE"):
        number = total.rpartition(":")[2]  # "4" and "gpu:4" are 4
        slurm = int(number) if number.isdecimal() else 0
    else:
        slurm = _count_listed(env.get("SLURM_JOB_GPUS", ""))
    return max(slurm, count, named_gpu_count(env.get("CUDA_VISIBLE_DEVICES"))) or None


def _count_listed(value: str) -> int:
    # "0,2-3" is 3.
    count = 0
    for entry in value.split(","):
        first, _, last = entry.rpartition(":")[2].partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            count += max(0, int(last or first) - int(first) + 1)
    return count


def device_index(local_rank: int | None, count: int) -> int | None:
    """The index of the GPU that a rank uses: its local rank modulo the number of GPUs; None without a GPU."""
    if count == 0:
        return None
    return 0 if local_rank is None else local_rank % count
