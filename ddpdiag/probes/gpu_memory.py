"""What a GPU tells of its memory's errors, as NVML counts them. Only a worker calls this."""

from msgspec import Struct

from ddpdiag.probes.gpu_device import Device

# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t, nvmlPageRetirementCause_t.
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_SRAM = 7
_SINGLE_BIT_ERRORS, _DOUBLE_BIT_ERROR = 0, 1
_SRAM_MEMBERS = (
    "volatileUncParity",
    "volatileUncSecDed",
    "aggregateUncParity",
    "aggregateUncSecDed",
    "bThresholdExceeded",
)


class MemoryErrors(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU's memory errors; None is what it does not say.

    Volatile counters start at the last load of the driver (or reset of the GPU), aggregate ones at its first. Those
    without `sram` in the name count all memory, SRAM included. Cards before Ampere retire pages, later ones remap rows;
    what is pending waits for a reset. `uncorrectable_remaps` and `correctable_remaps` count rows by their cause.
    """

    ecc: bool | None = None
    ecc_after_reboot: bool | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    uncorrected_ever: int | None = None
    sram_uncorrected: int | None = None
    sram_uncorrected_ever: int | None = None
    sram_threshold_exceeded: bool | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    correctable_remaps: int | None = None
    uncorrectable_remaps: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


def memory_errors(device: Device) -> MemoryErrors:
    """All that the GPU says of them."""
    mode = device.numbers("nvmlDeviceGetEccMode") or (None, None)
    rows = device.numbers("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    sram, sram_ever, exceeded = _sram(device)
    return MemoryErrors(
        ecc=_flag(mode[0]),
        ecc_after_reboot=_flag(mode[1]),
        corrected=device.number("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
        uncorrected=device.number("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        uncorrected_ever=device.number("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _AGGREGATE),
        sram_uncorrected=sram,
        sram_uncorrected_ever=sram_ever,
        sram_threshold_exceeded=exceeded,
        retired_pages=_retired(device),
        retirement_pending=device.flag("nvmlDeviceGetRetiredPagesPendingStatus"),
        correctable_remaps=rows[0],
        uncorrectable_remaps=rows[1],
        remap_pending=_flag(rows[2]),
        remap_failed=_flag(rows[3]),
    )


def _sram(device: Device) -> tuple[int | None, int | None, bool | None]:
    """Uncorrected errors of SRAM since the driver was loaded, and ever, and whether they are too many by NVIDIA's own
    limit; drivers before 550 know the first two by location only."""
    status = device.members("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t", _SRAM_MEMBERS)
    if status:
        recent = status["volatileUncParity"] + status["volatileUncSecDed"]
        ever = status["aggregateUncParity"] + status["aggregateUncSecDed"]
        return recent, ever, bool(status["bThresholdExceeded"])
    function = "nvmlDeviceGetMemoryErrorCounter"
    recent_only, ever_only = (device.number(function, _UNCORRECTED, kind, _SRAM) for kind in (_VOLATILE, _AGGREGATE))
    return recent_only, ever_only, None


def _retired(device: Device) -> int | None:
    """Pages retired for either cause."""
    causes = (_SINGLE_BIT_ERRORS, _DOUBLE_BIT_ERROR)
    pages = [device.numbers("nvmlDeviceGetRetiredPages", cause) for cause in causes]
    known = [len(own) for own in pages if own is not None]
    return sum(known) if known else None


def _flag(number: int | None) -> bool | None:
    return None if number is None else bool(number)
