"""The health of each GPU as NVML reports it: errors of memory and links, clocks, processes, and load during training.

Only a worker calls these functions, since any NVML query may hang on a faulty GPU. A field that the GPU does not
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
from ddpdiag.probes.gpu.nvml import BrokenState, Device, Gpu, NvmlError, memory, opened_gpus, opened_nvml, try_query

# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t; NVML_TEMPERATURE_GPU, NVML_CLOCK_SM.
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE = 0
_SRAM = 7
_SRAM_MEMBERS = ("volatileUncParity", "volatileUncSecDed", "bThresholdExceeded")
_GPU_SENSOR = 0
_SM_CLOCK = 1
# The first driver that reports the recovery action. In an older driver the field's number may have another meaning.
_RECOVERY_DRIVER = 570


class MemoryErrors(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory errors of one GPU; a field that the GPU does not report is None.

    Errors are counted since the driver was loaded or the GPU was reset; `uncorrected` includes those of SRAM. GPUs
    before Ampere retire faulty pages, newer GPUs remap faulty rows. `..._pending`: the change takes effect at the next
    reset. `remaps` counts rows that were remapped because of uncorrectable errors.
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
    rows = device.numbers("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    status = device.members("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t", _SRAM_MEMBERS)
    if status:
        sram: int | None = status["volatileUncParity"] + status["volatileUncSecDed"]
    else:  # drivers before 550 report only the number of errors, and no threshold
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


# A CUDA context alone needs more memory than this.
CONTEXT_BYTES = 96 << 20


class Process(Struct, frozen=True):
    """A process on a GPU: its pid on the host, and its GPU memory in bytes (None: not reported)."""

    pid: int
    used_bytes: int | None


class Clocks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Possible causes of lowered clocks.

    `events` holds the reasons (bits of nvmlClocksEventReasons) that all three readings of `read_gpus` showed.
    """

    events: int | None = None
    celsius: int | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None


class Health(Gpu, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one GPU that the GPU checks judge.

    `compute_mode` and `recovery_action` are numbers of nvml.h. `memory_used_bytes` excludes the driver's reserve.
    `processes` are those that use CUDA. `has_graphics`: other processes use the GPU for graphics (a display server).
    """

    broken: BrokenState | None = None
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
        """Whether NVML reported more than the GPU's identity."""
        return self != Health(index=self.index, uuid=self.uuid, pci=self.pci, name=self.name)


class GpuReading(Struct, frozen=True, kw_only=True):
    """One reading of all GPUs: the driver's version and the GPUs, or `error` if NVML failed.

    `boot_seconds` is the time of the reading, on a clock that all processes of a host share. `kernel_line` is the
    sequence number of the newest record in the kernel's log at that time (None: not known).
    """

    driver: str | None = None
    gpus: tuple[Health, ...] = ()
    error: str | None = None
    boot_seconds: float | None = None
    kernel_line: int | None = None


def read_gpus(step: Callable[[str], None]) -> GpuReading:
    """Query every GPU that NVML shows. `step` receives the name of each GPU before its queries, which may hang."""
    try:
        step(NVML_STEP)
        with opened_nvml() as pynvml:
            driver = try_query(pynvml.nvmlSystemGetDriverVersion)
            gpus = tuple(_health(gpu, device, driver) for gpu, device in opened_gpus(pynvml, step))
            return GpuReading(driver=driver, gpus=gpus)
    except NvmlError as error:
        return GpuReading(error=str(error))


def _health(gpu: Gpu, device: Device | None, driver: str | None) -> Health:
    if device is None:
        return Health(**structs.asdict(gpu))
    # Three readings with other queries between them: a reason in all three is not only momentary.
    events = [clock_events(device)]
    links = nvlinks(device, has_blackwell_fields=reports_recovery(driver))
    events.append(clock_events(device))
    used, processes = device.query(memory), device.processes("Compute")
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
        recovery_action=device.fields("DEV_GET_GPU_RECOVERY_ACTION")[0] if reports_recovery(driver) else None,
        mig=device.mig(),
        compute_mode=device.number("nvmlDeviceGetComputeMode"),
        memory_used_bytes=None if used is None else used[1],
        processes=None if processes is None else tuple(Process(*process) for process in processes),
        has_graphics=bool(device.processes("Graphics")),
        # The last argument, because each of the queries above may set device.broken.
        broken=device.broken,
    )


def reports_recovery(driver: str | None) -> bool:
    """Whether a driver of this version ("570.86.15") reports the recovery action and the fields of Blackwell GPUs."""
    major = (driver or "").partition(".")[0]
    return major.isdecimal() and int(major) >= _RECOVERY_DRIVER


def _clocks(device: Device, readings: Sequence[int | None]) -> Clocks:
    known = [bits for bits in readings if bits is not None]
    return Clocks(
        events=reduce(and_, known) if known else None,
        celsius=device.number("nvmlDeviceGetTemperature", _GPU_SENSOR),
        power_limit_watts=_watts(device.number("nvmlDeviceGetPowerManagementLimit")),
        default_power_limit_watts=_watts(device.number("nvmlDeviceGetPowerManagementDefaultLimit")),
    )


def clock_events(device: Device) -> int | None:
    """Query the present reasons for lowered clocks, as bits of nvmlClocksEventReasons; None if not reported."""
    # NVML renamed the function with driver 535.54.03.
    bits = device.number("nvmlDeviceGetCurrentClocksEventReasons")
    return device.number("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


class GpuMonitor:
    """Reads the load and the processes of one GPU. Without a device, all results are None."""

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
        """Query the pids of the processes that compute on the GPU, as the host numbers them."""
        found = None if self._device is None else self._device.processes("Compute")
        return None if found is None else tuple(pid for pid, _ in found)


@contextmanager
def gpu_monitor(uuid: str | None) -> Iterator[GpuMonitor]:
    """Open NVML, and yield a monitor of the GPU with this UUID. All results are None if the GPU cannot be opened."""
    with ExitStack() as opened:
        try:
            pynvml = opened.enter_context(opened_nvml())
            handle = None if uuid is None else try_query(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except (NvmlError, OSError):
            handle = None
        yield GpuMonitor(None if handle is None else Device(handle))
