"""The health of each GPU as NVML reports it: errors of memory and links, clocks, other users, and its load at work.

Only a worker calls these functions, since a sick GPU may hang in any query of NVML. Each field that the GPU does not
support is None.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import and_

from msgspec import Struct, structs

from ddpdiag.model.measurements import GpuLoad
from ddpdiag.model.trial import NVML_STEP
from ddpdiag.probes.gpu.links import Fabric, NvLink, PcieLink, fabric, nvlinks
from ddpdiag.probes.gpu.nvml import Broken, Device, Gpu, NvmlError, memory, opened_gpus, opened_nvml, supported

# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t; NVML_TEMPERATURE_GPU, NVML_CLOCK_SM.
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE = 0
_SRAM = 7
_SRAM_MEMBERS = ("volatileUncParity", "volatileUncSecDed", "bThresholdExceeded")
_GPU_SENSOR = 0
_SM_CLOCK = 1
# The first driver with the recovery action. In an older driver the field's number may have another meaning.
_RECOVERY_DRIVER = 570


class MemoryErrors(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory errors of one GPU; a field that the GPU does not report is None.

    Errors count since the last load of the driver (or reset of the GPU); `uncorrected` includes those of SRAM. Cards
    before Ampere retire pages, later ones remap rows. `..._pending` means that the change takes effect at the next
    reset. `remaps` counts rows that were remapped for uncorrectable errors.
    """

    corrected: int | None = None
    uncorrected: int | None = None
    sram_uncorrected: int | None = None
    sram_threshold_exceeded: bool | None = None
    retirement_pending: bool | None = None
    remaps: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


def memory_errors(device: Device) -> MemoryErrors:
    """Query all memory errors that the GPU reports."""
    rows = device.numbers("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    status = device.members("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t", _SRAM_MEMBERS)
    if status:
        sram: int | None = status["volatileUncParity"] + status["volatileUncSecDed"]
    else:  # drivers before 550 have only the count by location, and no threshold
        sram = device.number("nvmlDeviceGetMemoryErrorCounter", _UNCORRECTED, _VOLATILE, _SRAM)
    return MemoryErrors(
        corrected=device.number("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
        uncorrected=device.number("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        sram_uncorrected=sram,
        sram_threshold_exceeded=_flag(status.get("bThresholdExceeded")),
        retirement_pending=_flag(device.number("nvmlDeviceGetRetiredPagesPendingStatus")),
        remaps=rows[1],
        remap_pending=_flag(rows[2]),
        remap_failed=_flag(rows[3]),
    )


def _flag(number: int | None) -> bool | None:
    return None if number is None else bool(number)


# The CUDA context alone of a process takes more memory than this.
CONTEXT_BYTES = 96 << 20


class Process(Struct, frozen=True):
    """A process by its pid on the host; `used_bytes` is None if NVML does not report the memory."""

    pid: int
    used_bytes: int | None


class Clocks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Causes of lowered clocks: the temperature in degrees Celsius, and power limits in watts.

    `events` holds the bits of nvmlClocksEventReasons that all of three readings showed.
    """

    events: int | None = None
    celsius: int | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None


class Health(Gpu, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU with all that the GPU checks judge.

    `compute_mode` and `recovery_action` are numbers of nvml.h. `memory_used_bytes` excludes the driver's reserve.
    `processes` use CUDA; `has_graphics` says that other processes draw on the GPU (a display server, a browser).
    """

    broken: Broken | None = None
    memory: MemoryErrors = MemoryErrors()
    pcie: PcieLink = PcieLink()
    clocks: Clocks = Clocks()
    nvlinks: tuple[NvLink, ...] = ()
    fabric: Fabric = Fabric()
    recovery_action: int | None = None
    mig: bool | None = None
    compute_mode: int | None = None
    memory_used_bytes: int | None = None
    processes: tuple[Process, ...] | None = None
    has_graphics: bool = False

    @property
    def is_known(self) -> bool:
        """Whether NVML answered anything beyond the GPU's identity."""
        return self != Health(index=self.index, uuid=self.uuid, pci=self.pci, name=self.name)


class Look(Struct, frozen=True, kw_only=True):
    """The result of reading all GPUs: the driver's version and the GPUs, or `error` if NVML failed.

    `boot_seconds` is the time of the reading, on a clock that all processes of a host share. `kernel_line` is the
    number of the newest record in the kernel's log at that time (None: not known).
    """

    driver: str | None = None
    gpus: tuple[Health, ...] = ()
    error: str | None = None
    boot_seconds: float | None = None
    kernel_line: int | None = None


def look(step: Callable[[str], None]) -> Look:
    """Query every GPU that NVML shows. `step` receives the name of each GPU first, in case its query hangs."""
    try:
        step(NVML_STEP)
        with opened_nvml() as pynvml:
            driver = supported(pynvml.nvmlSystemGetDriverVersion)
            gpus = tuple(_health(gpu, device, driver) for gpu, device in opened_gpus(pynvml, step))
            return Look(driver=driver, gpus=gpus)
    except NvmlError as error:
        return Look(error=str(error))


def _health(gpu: Gpu, device: Device | None, driver: str | None) -> Health:
    if device is None:
        return Health(**structs.asdict(gpu))
    # Three readings with other queries between them: a reason that all three show is no flicker.
    events = [clock_events(device)]
    links = nvlinks(device, newer=tells_recovery(driver))
    events.append(clock_events(device))
    used, processes = device.of(memory), device.processes("Compute")
    errors = memory_errors(device)
    events.append(clock_events(device))
    return Health(
        **structs.asdict(gpu),
        memory=errors,
        pcie=PcieLink(
            width=device.number("nvmlDeviceGetCurrPcieLinkWidth"),
            width_max=device.number("nvmlDeviceGetMaxPcieLinkWidth"),
            generation_max=device.number("nvmlDeviceGetMaxPcieLinkGeneration"),
            replays=device.number("nvmlDeviceGetPcieReplayCounter"),
        ),
        clocks=_clocks(device, events),
        nvlinks=links,
        fabric=fabric(device),
        recovery_action=device.fields("DEV_GET_GPU_RECOVERY_ACTION")[0] if tells_recovery(driver) else None,
        mig=device.mig(),
        compute_mode=device.number("nvmlDeviceGetComputeMode"),
        memory_used_bytes=None if used is None else used[1],
        processes=None if processes is None else tuple(Process(*process) for process in processes),
        has_graphics=bool(device.processes("Graphics")),
        # Last, because the answer to any query may set it.
        broken=device.broken,
    )


def tells_recovery(driver: str | None) -> bool:
    """Whether a driver of this version ("570.86.15") reports the recovery action and Blackwell's fields."""
    major = (driver or "").partition(".")[0]
    return major.isdecimal() and int(major) >= _RECOVERY_DRIVER


def _clocks(device: Device, looks: Sequence[int | None]) -> Clocks:
    known = [bits for bits in looks if bits is not None]
    return Clocks(
        events=reduce(and_, known) if known else None,
        celsius=device.number("nvmlDeviceGetTemperature", _GPU_SENSOR),
        power_limit_watts=_watts(device.number("nvmlDeviceGetPowerManagementLimit")),
        default_power_limit_watts=_watts(device.number("nvmlDeviceGetPowerManagementDefaultLimit")),
    )


def clock_events(device: Device) -> int | None:
    """Query the bits of nvmlClocksEventReasons that are set now; None if the GPU does not report them."""
    # NVML renamed the function with driver 535.54.03.
    bits = device.number("nvmlDeviceGetCurrentClocksEventReasons")
    return device.number("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


class Watched:
    """The GPU whose load and processes can be read; without a device, all results are None."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device

    def load(self) -> GpuLoad | None:
        device = self._device
        if device is None:
            return None
        sm = device.number("nvmlDeviceGetClockInfo", _SM_CLOCK)
        return GpuLoad(
            sm_hz=None if sm is None else sm * 1e6,
            events=clock_events(device),
            celsius=device.number("nvmlDeviceGetTemperature", _GPU_SENSOR),
        )

    def pids(self) -> tuple[int, ...] | None:
        """Query the processes that compute on the GPU, by the pids that NVML reports."""
        found = None if self._device is None else self._device.processes("Compute")
        return None if found is None else tuple(pid for pid, _ in found)


@contextmanager
def watched(uuid: str | None) -> Iterator[Watched]:
    """Open NVML, and yield the GPU with this UUID. Its results are None if NVML or the GPU cannot be opened."""
    with ExitStack() as opened:
        try:
            pynvml = opened.enter_context(opened_nvml())
            handle = None if uuid is None else supported(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except (NvmlError, OSError):
            handle = None
        yield Watched(None if handle is None else Device(handle))
