"""What NVML tells of one GPU while it works: clocks, what holds them down, power, and who uses it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ddpdiag.model.measurements import GpuLoad
from ddpdiag.probes.gpu.health import clock_events
from ddpdiag.probes.gpu.nvml import Device, NvmlError, opened_nvml, supported

# nvml.h: NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU.
_SM, _MEMORY = 1, 2
_GPU_SENSOR = 0


class Watched:
    """One GPU whose load can be looked at; `driver` is the driver's version."""

    def __init__(self, device: Device | None = None, driver: str | None = None) -> None:
        self._device = device
        self.driver = driver

    def load(self) -> GpuLoad | None:
        """The GPU at this moment; None where NVML does not know it."""
        if self._device is None:
            return None
        milliwatts = self._device.number("nvmlDeviceGetPowerUsage")
        busy = self._device.of(_busy_percent)
        return GpuLoad(
            sm_hz=_hertz(self._device.number("nvmlDeviceGetClockInfo", _SM)),
            memory_hz=_hertz(self._device.number("nvmlDeviceGetClockInfo", _MEMORY)),
            events=clock_events(self._device),
            celsius=self._device.number("nvmlDeviceGetTemperature", _GPU_SENSOR),
            watts=None if milliwatts is None else milliwatts / 1e3,
            busy_share=None if busy is None else busy / 100,
        )

    def pids(self) -> tuple[int, ...] | None:
        """The processes that compute on it, as NVML numbers them."""
        found = None if self._device is None else self._device.processes("Compute")
        return None if found is None else tuple(pid for pid, _ in found)


@contextmanager
def watched(uuid: str | None) -> Iterator[Watched]:
    """The GPU with this UUID, for as long as NVML is open; one that says nothing where NVML does not know it."""
    with ExitStack() as opened:
        try:
            pynvml = opened.enter_context(opened_nvml())
            handle = None if uuid is None else supported(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
            found = Watched(None if handle is None else Device(handle), supported(pynvml.nvmlSystemGetDriverVersion))
        except (NvmlError, OSError):
            found = Watched()
        yield found


def _busy_percent(handle: object) -> int:
    import pynvml

    return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6
