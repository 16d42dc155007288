"""Query GPUs by NVML. NVML may hang in a driver, so only a worker calls it, and pynvml is imported in functions.

Without persistence mode, the driver starts a GPU when the first process on the host uses it, which takes 1 to 4 s, and
stops it after the last (docs.nvidia.com/deploy/driver-persistence). NVML starts a GPU when a process gets the GPU's
handle (nvmlInit_v2). So a process that has opened NVML keeps it open until the process ends: the first workers of a run
keep all GPUs started for later workers. Steps whose names begin with NVML_STEP are given more time for this reason.

NVML ignores CUDA_VISIBLE_DEVICES and numbers GPUs in PCI order, so a GPU is identified by its UUID, not by its index.

Any query of a GPU (`Device`) may fail: an old driver has no such function, a model has no such sensor, a MIG slice may
not be queried. The result is None then, also if this version of pynvml does not have the function or the constant.
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

    `pci` is the address as in sysfs (0000:1b:00.0). `error` is NVML's message if NVML could not open the GPU.
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
    """All GPUs that NVML shows to this process. After a failure, `trouble` is the reason and `error` NVML's message."""

    gpus: tuple[ListedGpu, ...] = ()
    driver: str | None = None
    trouble: Trouble | None = None
    error: str = ""


class NvmlError(Exception):
    """A failure with NVML's message. __cause__ is pynvml's error, or the ImportError if pynvml is not installed."""


@contextmanager
def opened_nvml() -> Iterator[ModuleType]:
    """Initialise NVML for this process, and yield pynvml. Raises NvmlError for all errors of NVML."""
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
    """List every GPU that NVML shows. A failure is returned, not raised. `step` announces each GPU first."""
    try:
        step(NVML_STEP)
        with opened_nvml() as pynvml:
            gpus = tuple(_listed(gpu, device) for gpu, device in opened_gpus(pynvml, step))
            step("driver version")
            return Enumeration(gpus=gpus, driver=try_query(pynvml.nvmlSystemGetDriverVersion))
    except NvmlError as error:
        return Enumeration(trouble=_trouble(error.__cause__), error=str(error))


# nvml.h, nvmlComputeMode_t: the modes in which CUDA allows only one process on a GPU.
EXCLUSIVE = (1, 3)


def is_exclusive() -> bool:
    """Query whether any GPU of this host is in an exclusive compute mode; False if NVML does not say."""
    with suppress(NvmlError), opened_nvml() as pynvml:
        indices = range(pynvml.nvmlDeviceGetCount())
        handles = [try_query(partial(pynvml.nvmlDeviceGetHandleByIndex, index)) for index in indices]
        modes = [try_query(partial(pynvml.nvmlDeviceGetComputeMode, gpu)) for gpu in handles if gpu is not None]
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
    """Open every GPU. The device is None if NVML cannot open the GPU. `step` announces each GPU, in case NVML hangs."""
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
    size, mig = device.query(memory), device.mig()
    return ListedGpu(**structs.asdict(gpu), memory_bytes=None if size is None else size[0], mig=mig)


def memory(handle: object) -> tuple[int, int]:
    """Query the GPU's total and used memory in bytes. A new driver does not count its own reserve as used."""
    import pynvml

    try:
        # Version 2 reports the memory that the driver reserves (hundreds of MiB) apart from the memory in use.
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(info.total), int(info.used)


def try_query(ask: Callable[[], T]) -> T | None:
    """Call `ask`, and return its result; None if NVML returns an error, as for a query that is not supported."""
    import pynvml

    # Newer pynvml raises this error instead of NVMLError if a driver before 510 does not have the new function.
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
    try:
        return ask()
    except (pynvml.NVMLError, mismatch):
        return None


def sysfs_address(bus_id: str) -> str:
    """Convert NVML's bus id ("00000000:1B:00.0") to the address in sysfs ("0000:1b:00.0")."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


class BrokenState(Enum):
    """A failure of the whole GPU, which the return code of any query may show (nvml.h, nvmlReturn_t)."""

    LOST = "GPU is lost"
    RESET_REQUIRED = "GPU requires reset"


_BROKEN = {15: BrokenState.LOST, 16: BrokenState.RESET_REQUIRED}
# nvml.h, nvmlValueType_t: which member of the union holds a field's value.
_UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Device:
    """A GPU that NVML has opened. Methods are queries; the last return code that shows a failed GPU sets `broken`."""

    def __init__(self, handle: object) -> None:
        import pynvml

        self._nvml = pynvml
        self._handle = handle
        self.broken: BrokenState | None = None

    def number(self, function: str, *arguments: int) -> int | None:
        return self._ask(function, lambda: int(getattr(self._nvml, function)(self._handle, *arguments)))

    def pair_number(self, function: str, other: "Device", *arguments: int) -> int | None:
        """Query the number that the NVML function returns for this GPU and another GPU."""
        return self._ask(function, lambda: int(getattr(self._nvml, function)(self._handle, other._handle, *arguments)))

    def numbers(self, function: str, *arguments: int) -> tuple[int, ...] | None:
        """Query the numbers that the NVML function returns, as several values or as a list."""
        return self._ask(function, lambda: tuple(map(int, getattr(self._nvml, function)(self._handle, *arguments))))

    def pci(self) -> str | None:
        """Query the GPU's PCI address, as sysfs writes it."""
        return self.query(lambda handle: sysfs_address(str(self._nvml.nvmlDeviceGetPciInfo(handle).busId)))

    def mig(self) -> bool | None:
        """Query whether the GPU is split into slices (MIG)."""
        mode = self.numbers("nvmlDeviceGetMigMode")
        return None if mode is None else bool(mode[0])

    def busy_share(self) -> float | None:
        """Query the share of the last sample period in which a CUDA kernel ran, from 0 to 1."""
        return self.query(lambda handle: float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100)

    def text(self, function: str) -> str | None:
        return self._ask(function, lambda: str(getattr(self._nvml, function)(self._handle)))

    def members(self, function: str, structure: str, names: Sequence[str]) -> Mapping[str, int]:
        """Query members of the structure that the NVML function fills; empty if the query fails.

        An array of bytes is returned as one big-endian number.
        """
        kind = getattr(self._nvml, structure, None)
        if kind is None:
            return {}
        filled = kind()
        done = self._ask(function, lambda: getattr(self._nvml, function)(self._handle, ctypes.byref(filled)) == 0)
        return {name: _member_number(filled, name) for name in names if hasattr(filled, name)} if done else {}

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
                int(getattr(answer.value, _UNION_MEMBERS[answer.valueType]))
                if answer.nvmlReturn == 0 and answer.valueType < len(_UNION_MEMBERS)
                else None
                for answer in getattr(self._nvml, function)(self._handle, wanted)
            ),
        )
        return (None,) * len(wanted) if values is None else values

    def processes(self, kind: str) -> tuple[tuple[int, int | None], ...] | None:
        """Query pid (on the host) and bytes (None: hidden, as under MIG) of all "Compute" or "Graphics" processes."""
        for function in (f"nvmlDeviceGet{kind}RunningProcesses_v3", f"nvmlDeviceGet{kind}RunningProcesses_v2"):
            found = self._ask(function, lambda function=function: self._processes(function))  # type: ignore[misc]
            if found is not None:
                return found
        return None

    def _processes(self, function: str) -> tuple[tuple[int, int | None], ...]:
        found = getattr(self._nvml, function)(self._handle)
        return tuple((int(process.pid), process.usedGpuMemory) for process in found)

    def query(self, ask: Callable[[object], T]) -> T | None:
        """Call `ask` with the GPU's handle, and return its result."""
        return try_query(lambda: self._with_broken_state(lambda: ask(self._handle)))

    def _ask(self, function: str, ask: Callable[[], T]) -> T | None:
        return try_query(lambda: self._with_broken_state(ask)) if hasattr(self._nvml, function) else None

    def _with_broken_state(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            self.broken = _BROKEN.get(error.value, self.broken)
            raise
        except (TypeError, ValueError, AttributeError, OverflowError):
            return None  # the result has an unexpected form, such as NaN


def _member_number(filled: ctypes.Structure, name: str) -> int:
    value = getattr(filled, name)
    if not isinstance(value, bytes | ctypes.Array):
        return int(value)
    # For an array of characters, ctypes returns only the bytes up to the first 0.
    member = getattr(type(filled), name)
    return int.from_bytes(bytes(filled)[member.offset : member.offset + member.size], "big")


class GpuUse(Struct, frozen=True, kw_only=True):
    """The present use of one GPU (`memory_bytes`: used memory), and the pids of the processes that compute on it."""

    index: int
    busy_share: float | None = None
    memory_bytes: int | None = None
    power_watts: float | None = None
    pids: tuple[int, ...] = ()


def gpu_uses() -> tuple[GpuUse, ...]:
    """Query the present use of each GPU. A GPU whose rank waits in a kernel of NCCL counts as 100 % busy."""
    import pynvml

    pynvml.nvmlInit()
    return tuple(_use(gpu, device) for gpu, device in opened_gpus(pynvml, lambda _: None))


def _use(gpu: Gpu, device: Device | None) -> GpuUse:
    if device is None:
        return GpuUse(index=gpu.index)
    used, milliwatts = device.query(memory), device.number("nvmlDeviceGetPowerUsage")
    return GpuUse(
        index=gpu.index,
        busy_share=device.busy_share(),
        memory_bytes=None if used is None else used[1],
        power_watts=None if milliwatts is None else milliwatts / 1e3,
        pids=tuple(pid for pid, _ in device.processes("Compute") or ()),
    )


if __name__ == "__main__":  # NVML may hang, so `ddpdiag watch` runs this module as a separate process
    sys.stdout.buffer.write(msgspec.json.encode(gpu_uses()))
