"""What one rank gives of the benchmark (COL002)."""

from msgspec import Struct

from ddpdiag.bandwidth.lines import Line
from ddpdiag.model.bench import Limits


class Data(Struct, frozen=True, kw_only=True):
    """One rank's part in one trial. `device` is the name of what it ran on; index, UUID and PCI address are a GPU's.

    `copies` are the rates of its own copies, in bytes copied per second, at moments that all ranks share. `remarks` say
    what was left out and why, and are the same on all ranks; `unsupported` names what was asked for and is not there.
    `whole`: neither time nor room was short.
    """

    backend: str
    collective: str
    ranks: int
    pid: int
    device: str
    device_index: int | None = None
    gpu_uuid: str | None = None
    pci: str | None = None
    limits: Limits = Limits()
    lines: tuple[Line, ...] = ()
    copies: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    whole: bool = True
