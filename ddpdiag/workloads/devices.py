"""A rank's device for a backend, the nominal rates of the device's links, and an exact product on each device."""

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
from ddpdiag.probes.net.adapters import outgoing_card

# Device types of two backends. Others use the first type that they are registered for; gloo is registered for GPUs too.
_DEVICE_TYPES = {"nccl": "cuda", "gloo": "cpu"}
MATRIX_ROWS = 512
# Factors are integers of at most this size, which TensorFloat-32 holds exactly. All partial sums stay below 2^24, so
# that float32 holds them exactly, whatever their order.
_MAX_FACTOR = 8


class Device(NamedTuple):
    """A device of torch. `gpu_index`, `uuid` and `pci` are None unless it is a CUDA device."""

    name: str
    gpu_index: int | None
    uuid: str | None
    pci: str | None


def device_type(backend: str) -> str:
    """The torch device type of a backend: from `_DEVICE_TYPES`, else the type that it registered first, else "cpu"."""
    registered = dist.Backend.backend_capability.get(backend, [])
    return _DEVICE_TYPES.get(backend) or next(iter(registered), "cpu")


def choose_device(backend: str, local_rank: int | None) -> torch.device:
    """Return the rank's device: the CPU, or an accelerator, which becomes current (RuntimeError if torch sees none)."""
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
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    pci = None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    uuid = getattr(properties, "uuid", None)  # torch 2.5 and later
    gpu_uuid = None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    return Device(properties.name, device.index, gpu_uuid, pci)


def link_limits(device: torch.device, overrides: Iterable[str] = ()) -> Limits:
    """The nominal rates of the network card and, for a GPU, of its NVLinks and its slot.

    `overrides` are environment variables to ignore, because they were set for an experiment only.
    """
    env = {name: value for name, value in os.environ.items() if name not in set(overrides)}
    nic = outgoing_card("nccl" if device.type == "cuda" else "gloo", env, sys_root(os.environ))
    limits = Limits()
    if nic is not None:
        rate, port_rate = nic.bytes_per_s, nic.port_bytes_per_s
        limits = Limits(nic=nic.name, nic_bytes_per_s=rate, nic_ports=nic.ports, nic_port_bytes_per_s=port_rate)
    uuid = describe(device).uuid
    if uuid is None:
        return limits
    links = connections(uuid, torch.cuda.get_device_capability(device))
    shown_uuids = (describe(torch.device("cuda", index)).uuid for index in range(torch.cuda.device_count()))
    return structs.replace(
        limits,
        **structs.asdict(links) | {"nvlink_domain": links.nvlink_domain if allows_mnnvl(env) else None},
        uuid=uuid,
        # Behind an NVSwitch all pairs of GPUs have the same rate, so the paths between pairs are not needed.
        peers={} if links.nvlink_switched else peers_of(uuid, [each for each in shown_uuids if each is not None]),
        cpu_vendor=processor_maker(proc_root(os.environ)),
    )


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work. On a CPU, do nothing."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Run `call`, and return the seconds until the device has finished it. Earlier queued work is not included."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def check_products(ctx: Context) -> Iterator[Product]:
    """Multiply two matrices on each GPU that torch shows, else on the CPU, and yield the result of each device."""
    left, right = factors()
    exact = left.to(torch.int64) @ right.to(torch.int64)
    count = torch.cuda.device_count() if torch.version.cuda or torch.version.hip else 0
    for index in range(count):
        ctx.step(f"multiply on GPU {index}")
        yield check_product(torch.device("cuda", index), left, right, exact)
    if not count:
        ctx.step("multiply on the CPU")
        yield check_product(torch.device("cpu"), left, right, exact)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices of small integers, the same in every call: float32 [MATRIX_ROWS, MATRIX_ROWS]."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randint(-_MAX_FACTOR, _MAX_FACTOR + 1, (2, MATRIX_ROWS, MATRIX_ROWS), generator=generator)
    return left.float(), right.float()


def check_product(device: torch.device, left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> Product:
    """Multiply on one device, and compare with the `exact` product. A RuntimeError of torch becomes `Product.error`."""
    name = "the CPU" if device.type == "cpu" else f"GPU {device.index}"
    begin = time.perf_counter()
    try:
        uuid = describe(device).uuid
        product = (left.to(device) @ right.to(device)).cpu()
    except RuntimeError as error:
        return Product(device=name, size=MATRIX_ROWS, error=first_line(error))
    seconds = time.perf_counter() - begin
    wrong = int((product.to(torch.float64) != exact).sum())
    return Product(device=name, size=MATRIX_ROWS, uuid=uuid, wrong=wrong, seconds=seconds)


def first_line(error: Exception) -> str:
    """The first line of an exception's message without its full stop, or the exception's class if that is empty."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
