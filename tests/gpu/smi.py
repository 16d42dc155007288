"""What `nvidia-smi -q -x` says beside what NVML told us, field by field."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ddpdiag.probes.gpu.health import GpuReading, Health

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# What moves between two looks: degrees, and counters of links that recover.
_CELSIUS = 8
_COMPUTE_MODES = {"Default": 0, "Exclusive_Thread": 1, "Prohibited": 2, "Exclusive_Process": 3}


class Field(NamedTuple):
    """One field: where nvidia-smi has it (names differ between drivers), how it is read, and what it may differ by."""

    name: str
    paths: tuple[str, ...]
    own: Callable[[Health], object]
    read: Callable[[str], object]
    most: float = 0.0


def _number(text: str) -> float | None:
    found = _NUMBER.search(text)
    return float(found[0]) if found else None


def _enabled(text: str) -> bool | None:
    return {"Enabled": True, "Yes": True, "Disabled": False, "No": False}.get(text)


_ROWS, _LINK = "remapped_rows/remapped_row", "pci/pci_gpu_link_info"
FIELDS = (
    Field("uuid", ("uuid",), lambda g: g.uuid, str),
    Field("name", ("product_name",), lambda g: g.name, str),
    Field("mig", ("mig_mode/current_mig",), lambda g: g.mig, _enabled),
    Field("compute mode", ("compute_mode",), lambda g: g.compute_mode, _COMPUTE_MODES.get),
    Field("remap pending", (f"{_ROWS}_pending",), lambda g: g.memory.remap_pending, _enabled),
    Field("remap failed", (f"{_ROWS}_failure",), lambda g: g.memory.remap_failed, _enabled),
    Field("rows, uncorrectable", (f"{_ROWS}_unc",), lambda g: g.memory.remaps, _number),
    Field("pcie width", (f"{_LINK}/link_widths/current_link_width",), lambda g: g.pcie.width, _number),
    Field("pcie width, most", (f"{_LINK}/link_widths/max_link_width",), lambda g: g.pcie.width_max, _number),
    Field("pcie generation, most", (f"{_LINK}/pcie_gen/max_link_gen",), lambda g: g.pcie.generation_max, _number),
    Field("pcie replays", ("pci/replay_counter",), lambda g: g.pcie.replays, _number, 100),
    Field("celsius", ("temperature/gpu_temp",), lambda g: g.clocks.celsius, _number, _CELSIUS),
    Field(
        "power limit",
        ("gpu_power_readings/current_power_limit", "power_readings/power_limit", "gpu_power_readings/power_limit"),
        lambda g: g.clocks.power_limit_watts, _number, 0.1,
    ),
    Field(
        "power limit, default",
        ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        lambda g: g.clocks.default_power_limit_watts, _number, 0.1,
    ),
)  # fmt: skip


def differences(look: GpuReading, document: str) -> list[str]:
    """Where the two differ; a field that nvidia-smi does not have ("N/A") must be None of ours."""
    try:
        root = ElementTree.fromstring(document)
    except ElementTree.ParseError as error:
        return [f"nvidia-smi -q -x cannot be read: {error}"]
    listed = root.findall("gpu")
    if look.error is not None or len(listed) != len(look.gpus):
        return [f"{len(look.gpus)} GPUs ({look.error or 'no error'}), nvidia-smi lists {len(listed)}"]
    found = (
        [f"driver {look.driver}, nvidia-smi says {said}"]
        if (said := _text(root, "driver_version")) != look.driver
        else []
    )
    return [*found, *(text for gpu, own in zip(look.gpus, listed, strict=True) for text in _of_gpu(gpu, own))]


def _of_gpu(gpu: Health, element: ElementTree.Element) -> Iterator[str]:
    address = (element.get("id") or "").lower()
    if gpu.pci is not None and not address.endswith(gpu.pci):
        yield f"GPU {gpu.index}: pci {gpu.pci}, nvidia-smi says {address}"
    for field in FIELDS:
        said = next((text for path in field.paths if (text := _text(element, path)) is not None), None)
        if said is None:
            continue  # this driver has no such field
        theirs = None if said in ("N/A", "[N/A]", "Requested functionality has been deprecated") else field.read(said)
        if _differ(field.own(gpu), theirs, field.most):
            yield f"GPU {gpu.index}: {field.name} {field.own(gpu)}, nvidia-smi says {said}"


def _differ(own: object, theirs: object, most: float) -> bool:
    if isinstance(own, int | float) and isinstance(theirs, int | float):
        return abs(own - theirs) > most
    return own != theirs


def _text(element: ElementTree.Element, path: str) -> str | None:
    found = element.findtext(path)
    return None if found is None else found.strip()
