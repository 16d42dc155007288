"""GPUs as NVML shows them. NVML may hang in a driver, so only a worker calls it, and pynvml is imported in functions.

Without persistence mode the driver starts a GPU for its first user on the host, which takes 1 to 4 s, and stops it
after the last one (docs.nvidia.com/deploy/driver-persistence). So a process that has opened NVML keeps it open until
the process ends: the plain workers of a run, which read the GPUs first, keep all GPUs started for later users. NVML
starts a GPU when a process gets its handle (nvmlInit_v2). The steps of these calls begin with NVML_STEP, so that a rank
has the time of a first use for them.

NVML ignores CUDA_VISIBLE_DEVICES and counts in PCI order, so a GPU is known by its UUID, never by its index.

Each query of a GPU (`Device`) has a return code: an old driver lacks a function, a model lacks a sensor, a MIG slice
may not be queried. A value without an answer is None. pynvml's names differ between its versions, so a function, a
structure or a constant that pynvml lacks counts as not answered.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from types import ModuleType
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from ddpdiag.model.trial import NVML_STEP

T = TypeVar("T")


class Trouble(Enum):
    """The reason why NVML could not list the GPUs."""

    ABSENT = "no library or no driver"
    MISMATCH = "driver and library differ"
    OTHER = "other"


class Gpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The identity of a GPU; a field that the GPU does not support is None.

    `pci` is written as in sysfs (0000:1b:00.0). `error` is NVML's text for a GPU that NVML could not open.
    """

    index: int
    uuid: str | None = None
    pci: str | None = None
    name: str | None = None
    error: str | None = None


class ListedGpu(Gpu, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU with its memory in bytes, and whether it is split into slices (MIG)."""

    memory_bytes: int | None = None
    mig: bool | None = None


class Enumeration(Struct, frozen=True, kw_only=True):
    """All GPUs that NVML shows to this process; or `trouble`, and NVML's text in `error`."""

    gpus: tuple[ListedGpu, ...] = ()
    driver: str | None = None
    trouble: Trouble | None = None
    error: str = ""


class NvmlError(Exception):
    """A failure with NVML's text. Its cause is pynvml's error, or the ImportError if there is no pynvml."""


@contextmanager
def opened_nvml() -> Iterator[ModuleType]:
    """Initialise NVML for this process, and yield pynvml. NvmlError if that fails, or for NVML's later errors."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlError(str(error)) from error
    try:
        pynvml.nvmlInit()
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error


def enumerate_gpus(step: Callable[[str], None]) -> Enumeration:
    """List every GPU that NVML shows. A failure is returned, not raised. `step` receives the name of each GPU first."""
    try:
        step(NVML_STEP)
        with opened_nvml() as pynvml:
            gpus = tuple(_listed(gpu, device) for gpu, device in opened_gpus(pynvml, step))
            step("driver version")
            return Enumeration(gpus=gpus, driver=supported(pynvml.nvmlSystemGetDriverVersion))
    except NvmlError as error:
        return Enumeration(trouble=_trouble(error.__cause__), error=str(error))


# nvml.h, nvmlComputeMode_t: the modes in which a GPU allows one process, and CUDA refuses a second one.
EXCLUSIVE = (1, 3)


def is_exclusive() -> bool:
    """Query whether a GPU of this host is in an exclusive compute mode; False if NVML does not say."""
    with suppress(NvmlError), opened_nvml() as pynvml:
        indices = range(pynvml.nvmlDeviceGetCount())
        handles = [supported(partial(pynvml.nvmlDeviceGetHandleByIndex, index)) for index in indices]
        modes = [supported(partial(pynvml.nvmlDeviceGetComputeMode, gpu)) for gpu in handles if gpu is not None]
        return any(mode in EXCLUSIVE for mode in modes)
    return False


def _trouble(error: BaseException | None) -> Trouble:
    if isinstance(error, ImportError):
        return Trouble.ABSENT
    import pynvml

    match error:
        case pynvml.NVMLError_LibraryNotFound() | pynvml.NVMLError_DriverNotLoaded():
            return Trouble.ABSENT
        case pynvml.NVMLError_LibRmVersionMismatch():
            return Trouble.MISMATCH
        case _:
            return Trouble.OTHER


def opened_gpus(pynvml: ModuleType, step: Callable[[str], None]) -> Iterator[tuple[Gpu, "Device | None"]]:
    """Open every GPU; its device is None if NVML could not. `step` receives its name first, in case NVML hangs."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        step(f"{NVML_STEP}: GPU {index}")
        try:
            device = Device(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            yield Gpu(index=index, error=str(error)), None
            continue
        pci = device.pci()
        step(f"GPU {index} (PCI {pci})")
        uuid, name = device.text("nvmlDeviceGetUUID"), device.text("nvmlDeviceGetName")
        yield Gpu(index=index, uuid=uuid, pci=pci, name=name), device


def _listed(gpu: Gpu, device: "Device | None") -> ListedGpu:
    if device is None:
        return ListedGpu(**structs.asdict(gpu))
    size, mig = device.of(memory), device.mig()
    return ListedGpu(**structs.asdict(gpu), memory_bytes=None if size is None else size[0], mig=mig)


def memory(handle: object) -> tuple[int, int]:
    """Query the GPU's bytes of memory, in all and in use. A new driver does not count its reserve as used."""
    import pynvml

    try:
        # Version 2 reports the memory that the driver reserves (hundreds of MiB) apart from the memory in use.
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(info.total), int(info.used)


def supported(ask: Callable[[], T]) -> T | None:
    """Call `ask`, and return its result; None if the device or the driver does not support the query."""
    import pynvml

    # Newer pynvml raises this, and no NVMLError, if a driver before 510 lacks the function behind an old name.
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
    try:
        return ask()
    except (pynvml.NVMLError, mismatch):
        return None


def sysfs_address(bus_id: str) -> str:
    """Convert NVML's bus id ("00000000:1B:00.0") to the address in sysfs ("0000:1b:00.0")."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


class Broken(Enum):
    """The state of the GPU that a return code shows, whatever the query was (nvml.h, nvmlReturn_t)."""

    LOST = "GPU is lost"
    RESET_REQUIRED = "GPU requires reset"


_BROKEN = {15: Broken.LOST, 16: Broken.RESET_REQUIRED}
# nvml.h, nvmlValueType_t: which member of the union holds a field's value.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Device:
    """A GPU that NVML has opened; each method is a query. `broken` is the state that return codes have shown."""

    def __init__(self, handle: object) -> None:
        import pynvml

        self._nvml = pynvml
        self._handle = handle
        self.broken: Broken | None = None

    def number(self, function: str, *arguments: int) -> int | None:
        return self._ask(function, lambda: int(getattr(self._nvml, function)(self._handle, *arguments)))

    def towards(self, function: str, other: "Device", *arguments: int) -> int | None:
        """Query the number that the NVML function returns for this GPU and another one."""
        return self._ask(function, lambda: int(getattr(self._nvml, function)(self._handle, other._handle, *arguments)))

    def numbers(self, function: str, *arguments: int) -> tuple[int, ...] | None:
        """Query the numbers that the NVML function returns (its out parameters, or a list)."""
        return self._ask(function, lambda: tuple(map(int, getattr(self._nvml, function)(self._handle, *arguments))))

    def pci(self) -> str | None:
        """Query the GPU's PCI address, as sysfs writes it."""
        return self.of(lambda handle: sysfs_address(str(self._nvml.nvmlDeviceGetPciInfo(handle).busId)))

    def mig(self) -> bool | None:
        """Query whether the GPU is split into slices (MIG)."""
        mode = self.numbers("nvmlDeviceGetMigMode")
        return None if mode is None else bool(mode[0])

    def busy_share(self) -> float | None:
        """Query the share of the last sample period in which a kernel ran, from 0 to 1."""
        return self.of(lambda handle: float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100)

    def text(self, function: str) -> str | None:
        return self._ask(function, lambda: str(getattr(self._nvml, function)(self._handle)))

    def members(self, function: str, structure: str, names: Sequence[str]) -> Mapping[str, int]:
        """Query members of the structure that the function fills; empty without an answer, or if pynvml lacks either.

        An array of bytes is one number, whose first byte is the highest.
        """
        kind = getattr(self._nvml, structure, None)
        if kind is None:
            return {}
        filled = kind()
        done = self._ask(function, lambda: getattr(self._nvml, function)(self._handle, ctypes.byref(filled)) == 0)
        return {name: _member(filled, name) for name in names if hasattr(filled, name)} if done else {}

    def fields(self, name: str, scopes: Iterable[int] = (0,)) -> tuple[int | None, ...]:
        """Query the field NVML_FI_`name` for each scope (a link's number); None for a scope without a value."""
        function, field = "nvmlDeviceGetFieldValues", getattr(self._nvml, f"NVML_FI_{name}", None)
        wanted = [(field, scope) for scope in scopes]
        if field is None or not wanted:
            return (None,) * len(wanted)
        values = self._ask(
            function,
            lambda: tuple(
                # Each value has a return code, which says whether the value is valid.
                int(getattr(answer.value, _MEMBERS[answer.valueType]))
                if answer.nvmlReturn == 0 and answer.valueType < len(_MEMBERS)
                else None
                for answer in getattr(self._nvml, function)(self._handle, wanted)
            ),
        )
        return (None,) * len(wanted) if values is None else values

    def processes(self, kind: str) -> tuple[tuple[int, int | None], ...] | None:
        """Query pid (on the host) and bytes (None: hidden, as under MIG) of each "Compute" or "Graphics" process."""
        for function in (f"nvmlDeviceGet{kind}RunningProcesses_v3", f"nvmlDeviceGet{kind}RunningProcesses_v2"):
            found = self._ask(function, lambda function=function: self._processes(function))  # type: ignore[misc]
            if found is not None:
                return found
        return None

    def _processes(self, function: str) -> tuple[tuple[int, int | None], ...]:
        found = getattr(self._nvml, function)(self._handle)
        return tuple((int(process.pid), process.usedGpuMemory) for process in found)

    def of(self, ask: Callable[[object], T]) -> T | None:
        """Call `ask` with the GPU's handle, and return its result."""
        return supported(lambda: self._remembering_broken(lambda: ask(self._handle)))

    def _ask(self, function: str, ask: Callable[[], T]) -> T | None:
        return supported(lambda: self._remembering_broken(ask)) if hasattr(self._nvml, function) else None

    def _remembering_broken(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            self.broken = _BROKEN.get(error.value, self.broken)
            raise
        except (TypeError, ValueError, AttributeError, OverflowError):
            return None  # an answer in a form that this version does not know, such as NaN


def _member(filled: ctypes.Structure, name: str) -> int:
    value = getattr(filled, name)
    if not isinstance(value, bytes | ctypes.Array):
        return int(value)
    # For an array of characters, ctypes returns only the bytes up to the first 0.
    member = getattr(type(filled), name)
    return int.from_bytes(bytes(filled)[member.offset : member.offset + member.size], "big")


class GpuUse(Struct, frozen=True, kw_only=True):
    """The use of one GPU of this host as NVML reports it, and the pids of the processes that compute on it."""

    index: int
    busy_share: float | None = None
    memory_bytes: int | None = None
    power_watts: float | None = None
    pids: tuple[int, ...] = ()


def gpu_uses() -> tuple[GpuUse, ...]:
    """Query the present use of each GPU. A rank that waits in a kernel of NCCL keeps its GPU at 100 %."""
    import pynvml

    pynvml.nvmlInit()
    return tuple(_use(gpu, device) for gpu, device in opened_gpus(pynvml, lambda _: None))


def _use(gpu: Gpu, device: Device | None) -> GpuUse:
    if device is None:
        return GpuUse(index=gpu.index)
    used, milliwatts = device.of(memory), device.number("nvmlDeviceGetPowerUsage")
    return GpuUse(
        index=gpu.index,
        busy_share=device.busy_share(),
        memory_bytes=None if used is None else used[1],
        power_watts=None if milliwatts is None else milliwatts / 1e3,
        pids=tuple(pid for pid, _ in device.processes("Compute") or ()),
    )


if __name__ == "__main__":  # NVML may hang, so `ddpdiag watch` runs this module as a separate process
    sys.stdout.buffer.write(msgspec.json.encode(gpu_uses()))
