"""GPUs as NVML shows them. NVML may hang in a driver, so only a worker calls this; pynvml is imported inside.

NVML knows nothing of CUDA_VISIBLE_DEVICES and counts in PCI order, so a GPU is known by its UUID, never by its index.
"""

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")


class Trouble(Enum):
    """Why NVML gave nothing."""

    NO_LIBRARY = "no library"
    NO_DRIVER = "no driver"
    MISMATCH = "driver and library differ"
    OTHER = "other"


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU; a field that it does not support is None.

    `pci` is written as sysfs does (0000:1b:00.0); `error` is NVML's text for a GPU that it could not open.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci: str | None = None
    memory_bytes: int | None = None
    mig: bool | None = None
    error: str | None = None


class Enumeration(Struct, frozen=True, kw_only=True):
    """All GPUs that NVML opens for this process, or `trouble` and NVML's own text in `error`."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    trouble: Trouble | None = None
    error: str = ""


def enumerate_gpus() -> Enumeration:
    """Every GPU that NVML shows; trouble is an answer, not an exception."""
    try:
        import pynvml
    except ImportError as error:
        return Enumeration(trouble=Trouble.NO_LIBRARY, error=str(error))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Enumeration(trouble=_trouble(error), error=str(error))
    try:
        return Enumeration(
            gpus=tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())),
            driver=supported(pynvml.nvmlSystemGetDriverVersion),
        )
    except pynvml.NVMLError as error:
        return Enumeration(trouble=Trouble.OTHER, error=str(error))
    finally:
        pynvml.nvmlShutdown()


def _trouble(error: Exception) -> Trouble:
    import pynvml

    match error:
        case pynvml.NVMLError_LibraryNotFound():
            return Trouble.NO_LIBRARY
        case pynvml.NVMLError_DriverNotLoaded():
            return Trouble.NO_DRIVER
        case pynvml.NVMLError_LibRmVersionMismatch():
            return Trouble.MISMATCH
        case _:
            return Trouble.OTHER


def _gpu(index: int) -> Gpu:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return Gpu(index=index, error=str(error))
    total = supported(lambda: memory(handle)[0])
    return Gpu(
        index=index,
        name=supported(lambda: str(pynvml.nvmlDeviceGetName(handle))),
        uuid=supported(lambda: str(pynvml.nvmlDeviceGetUUID(handle))),
        pci=supported(lambda: sysfs_address(str(pynvml.nvmlDeviceGetPciInfo(handle).busId))),
        memory_bytes=total,
        mig=supported(lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0])),
    )


def memory(handle: object) -> tuple[int, int]:
    """Bytes in all and in use, the latter without what the driver reserves for itself, if it is new enough to tell."""
    import pynvml

    try:
        # Version 2 keeps what the driver reserves (hundreds of MiB) apart from what is used.
        seen = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        seen = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(seen.total), int(seen.used)


def supported(ask: Callable[[], T]) -> T | None:
    """The answer, or None if the device does not say."""
    import pynvml

    # What newer versions raise, and no NVMLError, where a driver before 510 lacks the function behind an old name.
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
    try:
        return ask()
    except (pynvml.NVMLError, mismatch):
        return None


def sysfs_address(bus_id: str) -> str:
    """NVML's bus id ("00000000:1B:00.0") as sysfs names the function ("0000:1b:00.0")."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
