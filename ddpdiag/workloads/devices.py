"""The device that a rank uses with a backend, the nominal rates of its links, and a matrix product on each device."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs

from ddpdiag.model.bench import Limits
from ddpdiag.model.measurements import Product
from ddpdiag.model.trial import Context
from ddpdiag.nccl_rings import allows_mnnvl
from ddpdiag.probes.gpu.iommu import processor_maker
from ddpdiag.probes.gpu.links import connections
from ddpdiag.probes.gpu.paths import peers_of
from ddpdiag.probes.gpu.visibility import device_index
from ddpdiag.probes.host.kernel import proc_root, sys_root
from ddpdiag.probes.net.adapters import route_out

# Device types of two backends. Others use the first type that they are registered for; gloo is registered for GPUs too.
_USUAL = {"nccl": "cuda", "gloo": "cpu"}
SIZE = 512
# Products of such integers stay below 2^24, so float32 holds every partial sum exactly, in whatever order they are
# added; TensorFloat-32 holds the factors.
_LARGEST = 8


class Device(NamedTuple):
    """The device of a rank; `number`, `uuid` and `pci` are None unless it is a CUDA device."""

    name: str
    number: int | None
    uuid: str | None
    pci: str | None


def device_type(backend: str) -> str:
    """The torch device type of a backend: that of `_USUAL`, else the first that the backend was registered for."""
    registered = dist.Backend.backend_capability.get(backend, [])
    return _USUAL.get(backend) or next(iter(registered), "cpu")


def choose_device(backend: str, local_rank: int | None) -> torch.device:
    """Select the rank's device: the accelerator of its local rank (RuntimeError if torch sees none), or the CPU."""
    kind = device_type(backend)
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if kind == "cuda" and module.device_count():
        # Without init, torch counts the GPUs that NVML lists, although CUDA may show only one slice of one GPU (MIG).
        module.init()
    index = device_index(local_rank, module.device_count())
    if index is None:
        what = "GPU" if kind == "cuda" else f"{kind} device"
        raise RuntimeError(f"{backend} needs a {what}, and torch {torch.__version__} sees none")
    device = torch.device(kind, index)
    module.set_device(device)
    return device


def describe(device: torch.device) -> Device:
    """The name, index, UUID and PCI address of a device, as its driver reports them."""
    if device.type != "cuda":
        return Device("CPU" if device.type == "cpu" else device.type, None, None, None)
    about = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    pci = None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    uuid = getattr(about, "uuid", None)  # torch 2.5 and later
    text = None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    return Device(about.name, device.index, text, pci)


def gpu_limits(device: torch.device, overrides: Iterable[str] = ()) -> Limits:
    """The nominal rates of the network card, and of a GPU's NVLinks and slot.

    `overrides` are environment variables to ignore: they were set for an experiment, and do not describe the hardware.
    """
    env = {name: value for name, value in os.environ.items() if name not in set(overrides)}
    nic = route_out("nccl" if device.type == "cuda" else "gloo", env, sys_root(os.environ))
    limits = Limits()
    if nic is not None:
        limits = Limits(
            nic=nic.name,
            nic_bytes_per_s=nic.bytes_per_s,
            nic_ports=nic.ports,
            nic_port_bytes_per_s=nic.port_bytes_per_s,
        )
    uuid = describe(device).uuid
    if uuid is None:
        return limits
    links = connections(uuid, torch.cuda.get_device_capability(device))
    shown = (describe(torch.device("cuda", index)).uuid for index in range(torch.cuda.device_count()))
    return structs.replace(
        limits,
        **structs.asdict(links) | {"nvlink_domain": links.nvlink_domain if allows_mnnvl(env) else None},
        uuid=uuid,
        # Behind an NVSwitch all pairs of GPUs have the same rate, so the paths between pairs are not needed.
        peers={} if links.nvlink_switched else peers_of(uuid, [own for own in shown if own is not None]),
        processor=processor_maker(proc_root(os.environ)),
    )


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work, which runs while Python continues. On a CPU, do nothing."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Run `call`: the seconds until the device has finished it, without work that was queued before."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def products(ctx: Context) -> Iterator[Product]:
    """Multiply on each GPU that torch shows, or on the CPU if it shows none, and yield the result of each device."""
    left, right = factors()
    exact = left.to(torch.int64) @ right.to(torch.int64)
    count = torch.cuda.device_count() if torch.version.cuda or torch.version.hip else 0
    for index in range(count):
        ctx.step(f"multiply on GPU {index}")
        yield multiplied(torch.device("cuda", index), left, right, exact)
    if not count:
        ctx.step("multiply on the CPU")
        yield multiplied(torch.device("cpu"), left, right, exact)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of small integers as float32 [SIZE, SIZE], always the same."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randint(-_LARGEST, _LARGEST + 1, (2, SIZE, SIZE), generator=generator)
    return left.float(), right.float()


def multiplied(device: torch.device, left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> Product:
    """Multiply on one device, and compare with the `exact` product; torch's RuntimeError becomes `Product.error`."""
    name = "the CPU" if device.type == "cpu" else f"GPU {device.index}"
    begin = time.perf_counter()
    try:
        uuid = describe(device).uuid
        found = (left.to(device) @ right.to(device)).cpu()
    except RuntimeError as error:
        return Product(device=name, size=SIZE, error=first_line(error))
    seconds = time.perf_counter() - begin
    wrong = int((found.to(torch.float64) != exact).sum())
    return Product(device=name, size=SIZE, uuid=uuid, wrong=wrong, seconds=seconds)


def first_line(error: Exception) -> str:
    """The first line of an exception's message without its full stop, or the name of its class if that is empty."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
