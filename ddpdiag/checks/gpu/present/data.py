"""One host's GPUs, put together from what its ranks answered to GPU001."""

from collections.abc import Mapping

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.hosts import Host, answers_by_host
from ddpdiag.probes.gpu.nvml import Enumeration, Gpu, Trouble
from ddpdiag.probes.gpu.visibility import PciFunction


class Data(Struct, frozen=True, kw_only=True):
    """What a rank finds by NVML, on the PCI bus (None: not readable), in /proc (None: no driver), in its variables.

    `visible` counts what CUDA would show to this rank, `promised` what launcher, container or CUDA_VISIBLE_DEVICES name
    (None: nothing); `cuda_visible_devices` is that variable (None: unset).
    """

    nvml: Enumeration
    functions: tuple[PciFunction, ...] | None = ()
    proc_gpus: int | None = None
    visible: int = 0
    promised: int | None = None
    cuda_visible_devices: str | None = None


class View(Struct, frozen=True, kw_only=True):
    """One host, from the answers of its ranks: with GPUs bound to ranks, each of these may see a part only.

    `listed` counts the driver's own list, `visible` what CUDA shows to the ranks together.
    """

    host: Host
    answers: Mapping[int, Data]
    gpus: tuple[Gpu, ...]
    lost: tuple[Gpu, ...]
    trouble: Trouble | None
    error: str
    functions: tuple[PciFunction, ...] | None
    listed: int
    visible: int
    promised: int | None


def views_of(seen: Seen[Data]) -> list[View]:
    """The hosts that answered, in order."""
    return [_view(host, rows) for host, rows in answers_by_host(seen)]


def _view(host: Host, rows: Mapping[int, Data]) -> View:
    every = [gpu for row in rows.values() for gpu in row.nvml.gpus]
    opened = {gpu.uuid or f"index {gpu.index}": gpu for gpu in every if gpu.error is None}
    lost = {gpu.index: gpu for gpu in every if gpu.error is not None}
    troubled = next((row.nvml for row in rows.values() if row.nvml.trouble), Enumeration())
    promises = [row.promised for row in rows.values() if row.promised is not None]
    return View(
        host=host,
        answers=rows,
        gpus=tuple(opened.values()),
        lost=tuple(lost.values()),
        trouble=troubled.trouble,
        error=troubled.error,
        functions=next((row.functions for row in rows.values() if row.functions is not None), None),
        listed=max(row.proc_gpus or 0 for row in rows.values()),
        visible=_visible(rows),
        # A MIG slice counts as a GPU for launchers and not for NVML, so the numbers cannot be compared.
        promised=max(promises) if promises and not any(gpu.mig for gpu in opened.values()) else None,
    )


def _visible(rows: Mapping[int, Data]) -> int:
    """Ranks that name or open different GPUs were bound to them, and theirs add up."""
    views = {(row.cuda_visible_devices, tuple(gpu.uuid for gpu in row.nvml.gpus)): row.visible for row in rows.values()}
    return sum(views.values())
