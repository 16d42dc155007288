"""The device that a rank uses with a backend, and the ways out of it."""

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpdiag.model.bench import Limits
from ddpdiag.probes.gpu.links import connections
from ddpdiag.probes.gpu.visibility import device_index
from ddpdiag.probes.host.kernel import sys_root
from ddpdiag.probes.net.adapters import route_out

# Where it is not the first of the devices for which a backend was registered: gloo takes tensors of GPUs as well.
_USUAL = {"nccl": "cuda", "gloo": "cpu"}


class Device(NamedTuple):
    """What a rank runs on; `number`, `uuid` and `pci` are None on a CPU."""

    name: str
    number: int | None
    uuid: str | None
    pci: str | None


def device_type(backend: str) -> str:
    """ "cuda", "cpu" or another type of torch's: the table's, else the first that the backend was registered for."""
    registered = dist.Backend.backend_capability.get(backend, [])
    return _USUAL.get(backend) or next(iter(registered), "cpu")


def choose_device(backend: str, local_rank: int | None) -> torch.device:
    """The device that a rank uses with a backend: the accelerator of its number, or the CPU; RuntimeError without."""
    kind = device_type(backend)
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    index = device_index(local_rank, module.device_count())
    if index is None:
        what = "GPU" if kind == "cuda" else f"{kind} device"
        raise RuntimeError(f"{backend} needs a {what}, and torch {torch.__version__} sees none")
    device = torch.device(kind, index)
    module.set_device(device)
    return device


def describe(device: torch.device) -> Device:
    """The device, as its driver names it."""
    if device.type != "cuda":
        return Device("CPU" if device.type == "cpu" else device.type, None, None, None)
    about = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    pci = None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    uuid = getattr(about, "uuid", None)  # torch 2.5 and later
    text = None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    return Device(about.name, device.index, text, pci)


def ways_out(device: torch.device, overrides: Iterable[str] = ()) -> Limits:
    """What the network card, and a GPU's NVLinks and slot, can carry: their nominal rates.

    `overrides` are variables that were set for an experiment and say nothing of what is there.
    """
    env = {name: value for name, value in os.environ.items() if name not in set(overrides)}
    nic = route_out("nccl" if device.type == "cuda" else "gloo", env, sys_root(os.environ))
    limits = Limits(
        nic=nic.name if nic else None,
        nic_bytes_per_s=nic.bytes_per_s if nic else None,
        nic_ports=nic.ports if nic else None,
        nic_port_bytes_per_s=nic.port_bytes_per_s if nic else None,
    )
    uuid = describe(device).uuid
    return limits if uuid is None else _with_connections(limits, uuid, device)


def _with_connections(limits: Limits, uuid: str, device: torch.device) -> Limits:
    own = connections(uuid, torch.cuda.get_device_capability(device))
    return Limits(
        nic=limits.nic,
        nic_bytes_per_s=limits.nic_bytes_per_s,
        nic_ports=limits.nic_ports,
        nic_port_bytes_per_s=limits.nic_port_bytes_per_s,
        nvlinks=own.nvlinks,
        nvlinks_max=own.nvlinks_max,
        nvlink_switched=own.nvlink_switched,
        nvlink_bytes_per_s=own.nvlink_bytes_per_s,
        pcie_bytes_per_s=own.pcie_bytes_per_s,
        pcie_now_bytes_per_s=own.pcie_now_bytes_per_s,
    )
