"""How busy each GPU is, in a process of its own, because NVML may hang: `python -m ddpdiag.watch.gpu_use`.

A rank that waits in a kernel of NCCL keeps its GPU at 100 %; one that never came to launch it leaves it idle.
"""

import sys

import msgspec

from ddpdiag.probes.gpu.nvml import memory, supported
from ddpdiag.probes.host.programs import run_bounded
from ddpdiag.watch.model import GpuUse

_gpus: msgspec.json.Decoder[tuple[GpuUse, ...]] = msgspec.json.Decoder(tuple[GpuUse, ...])


def read_uses(end: float) -> tuple[tuple[GpuUse, ...], str]:
    """The GPUs, or why they cannot be seen; `end` is of the monotonic clock."""
    try:
        said = run_bounded([sys.executable, "-m", "ddpdiag.watch.gpu_use"], end)
        return ((), "NVML did not answer in time") if said is None else (_gpus.decode(said.out), "")
    except (OSError, msgspec.DecodeError):
        return (), "NVML shows nothing"


def _uses() -> tuple[GpuUse, ...]:
    import pynvml

    pynvml.nvmlInit()
    return tuple(_use(index) for index in range(pynvml.nvmlDeviceGetCount()))


def _use(index: int) -> GpuUse:
    import pynvml

    handle = supported(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return GpuUse(index=index)
    return GpuUse(
        index=index,
        busy_share=supported(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        memory_bytes=supported(lambda: memory(handle)[1]),
        power_watts=supported(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        pids=tuple(supported(lambda: [own.pid for own in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]) or ()),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_uses()))
