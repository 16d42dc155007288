"""Measurements over the open process groups of a training job, in a process of the job: no group is created.

Each operation has a deadline. Nothing draws random numbers, and all tensors are freed.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import DeviceMesh

from ddpdiag.model.groups import GroupRecord, GroupTimes
from ddpdiag.text import size_text
from ddpdiag.workloads.collectives import RANK_PERIOD, pattern
from ddpdiag.workloads.devices import first_line

# A product takes an H100 0.2 ms and a processor core about as long. Processes that share a core take turns of 3 ms, so
# all products together have to take several turns.
_ROWS, _ROWS_ON_CPU = 4096, 256
_BATCHES, _CALLS = 4, 10
_MESSAGES = 3
_POLL_SECONDS = 1e-4
# gloo ends an all-reduce at its own deadline, and raises. It gets so long for this.
_GRACE_SECONDS = 0.5

Groups = DeviceMesh | Mapping[str, dist.ProcessGroup | None] | Sequence[dist.ProcessGroup | None] | dist.ProcessGroup


class NamedGroup(NamedTuple):
    """A group of the job, and its ranks. `group` is None on a rank outside of it."""

    name: str
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]


def name_groups(groups: Groups) -> list[NamedGroup]:
    """Return the groups with names. Raises TypeError for a value that is no group (torch: None or NON_GROUP_MEMBER)."""
    if isinstance(groups, DeviceMesh):
        names = groups.mesh_dim_names or [f"dim{number}" for number in range(groups.ndim)]
        is_member = groups.get_coordinate() is not None
        items: list[tuple[str, object]] = [
            (name, groups.get_group(number) if is_member else None) for number, name in enumerate(names)
        ]
    elif isinstance(groups, Mapping):
        items = [(str(name), group) for name, group in groups.items()]
    else:
        listed = [groups] if isinstance(groups, dist.ProcessGroup) else groups
        items = [(f"group{number}", group) for number, group in enumerate(listed)]
    return [_name_group(name, group) for name, group in items]


def _name_group(name: str, group: object) -> NamedGroup:
    if isinstance(group, dist.ProcessGroup):
        return NamedGroup(name, group, tuple(dist.get_process_group_ranks(group)))
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return NamedGroup(name, None, ())
    raise TypeError(f"{name} is of type {type(group).__name__}")


class _Stopped(Exception):
    """An operation that failed or did not end in time. Its arguments are the operation and the text of torch."""


def measure_groups(groups: Sequence[NamedGroup], sizes: Mapping[str, int], deadline: float) -> GroupRecord:
    """Measure this rank, and each of its groups in order. All ranks call it with the same names and `sizes`.

    `deadline` is a time.monotonic(). The first operation that fails or does not end in time ends the measurement.
    """
    name, times = "", list[GroupTimes]()
    record = GroupRecord(cores=tuple(sorted(os.sched_getaffinity(0))))
    try:
        device = next((_device_of(group) for _, group, _ in groups if group is not None), torch.device("cpu"))
        product_seconds, core_seconds = _time_product(device, deadline)
        record = structs.replace(record, device=device.type, product_seconds=product_seconds, core_seconds=core_seconds)
        for name, group, ranks in groups:
            if group is not None and len(ranks) > 1:
                times.append(_measure(name, group, ranks, sizes[name], deadline))
    except _Stopped as stop:
        step, error = stop.args
        timed_out = time.monotonic() >= deadline
        record = structs.replace(record, stopped_at=step, stopped_in=name, error=error, timed_out=timed_out)
    return structs.replace(record, groups=tuple(times))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """The device on which the job uses a group: an accelerator, if a backend other than gloo serves it."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    for kind in (kind for kind, backend in backends.items() if kind != "cpu" and backend != "gloo"):
        with suppress(RuntimeError):  # torch was built without this kind
            module = torch.get_device_module(kind)
            if module.is_available():
                return torch.device(kind, module.current_device())
    return torch.device("cpu")


def _time_product(device: torch.device, deadline: float) -> tuple[float, float]:
    """The mean seconds of a matrix product. On a CPU also the shortest time in which this thread had a core for one."""
    rows, dtype = (_ROWS_ON_CPU, torch.float32) if device.type == "cpu" else (_ROWS, torch.float16)
    left, right = (pattern(rows * rows, rank, device).view(rows, rows).div_(64).to(dtype) for rank in (0, 1))

    def multiply() -> list[dist.Work]:
        for _ in range(_CALLS):
            torch.mm(left, right)
        return []

    _timed("the work that was queued before the check", device, multiply, deadline)
    seconds, core_seconds = list[float](), list[float]()
    for _ in range(_BATCHES):
        core_begin = time.thread_time()
        seconds.append(_timed("the matrix products", device, multiply, deadline))
        core_seconds.append(time.thread_time() - core_begin)
    mean = fmean(seconds) / _CALLS
    return mean, min(core_seconds) / _CALLS if device.type == "cpu" else mean


def _measure(name: str, group: dist.ProcessGroup, ranks: tuple[int, ...], size: int, deadline: float) -> GroupTimes:
    """Time and verify an all-reduce over a group, and a message from each of its ranks to the next."""
    device, position, count, world_size = _device_of(group), group.rank(), max(1, size // 4), len(ranks)
    ramp = pattern(count, 0, device)
    factors = [rank % RANK_PERIOD + 1 for rank in range(world_size)]
    step = f"the all-reduce of {size_text(4 * count)} in group {name}"
    _all_reduce(step, group, torch.zeros(1, device=device), deadline)  # connects the ranks, and aligns them
    tensor = ramp * factors[position]
    seconds = _all_reduce(step, group, tensor, deadline)
    wrong_sums = int((tensor != ramp * sum(factors)).sum().item())
    torch.mul(ramp, factors[position], out=tensor)
    received, receive_seconds = torch.zeros_like(ramp), 0.0
    to, source = ranks[(position + 1) % world_size], ranks[position - 1]
    for phase in range(2 + world_size % 2):  # in each, a rank either sends to the next rank or receives
        if _phase(position, world_size) == phase:
            _message(f"a message to rank {to} in group {name}", dist.isend, tensor, to, group, deadline)
        elif _phase(position - 1, world_size) == phase:
            step = f"a message from rank {source} in group {name}"
            receive_seconds = _message(step, dist.irecv, received, source, group, deadline)
    return GroupTimes(
        name=name,
        group_size=world_size,
        size_bytes=4 * count,
        source=source,
        all_reduce_seconds=seconds,
        receive_seconds=receive_seconds,
        wrong_sums=wrong_sums,
        wrong_received=int((received != ramp * factors[position - 1]).sum().item()),
    )


def _phase(position: int, size: int) -> int:
    """The phase in which the rank at this position in a ring of `size` ranks sends."""
    return 2 if size % 2 and position % size == size - 1 else position % size % 2


def _all_reduce(step: str, group: dist.ProcessGroup, tensor: torch.Tensor, deadline: float) -> float:
    options = dist.AllreduceOptions()
    # gloo's thread ends then, too. A thread that waits for another rank would keep the process from ending.
    options.timeout = timedelta(seconds=max(0.01, deadline - time.monotonic()))
    return _timed(step, tensor.device, lambda: [group.allreduce([tensor], options)], deadline)


def _message(
    step: str, post: Callable[..., object], tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, deadline: float
) -> float:
    """Send or receive a tensor a few times, and return the shortest seconds. A first message of one element waits for
    the other rank."""

    # A single isend would create a communicator of two ranks. In a batch, NCCL uses that of the group.
    def exchange(part: torch.Tensor) -> list[dist.Work]:
        return list(dist.batch_isend_irecv([dist.P2POp(post, part, peer, group)]))

    _timed(step, tensor.device, lambda: exchange(tensor[:1]), deadline)
    return min(_timed(step, tensor.device, lambda: exchange(tensor), deadline) for _ in range(_MESSAGES))


def _timed(step: str, device: torch.device, post: Callable[[], list[dist.Work]], deadline: float) -> float:
    """Post operations, and return the seconds until they end. Raises _Stopped if they fail or exceed the deadline."""
    try:
        if device.type == "cpu":
            begin_seconds = time.perf_counter()
            for work in post():
                work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic()) + _GRACE_SECONDS))
            return time.perf_counter() - begin_seconds
        begin, end = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))
        begin.record()
        for work in post():
            work.wait()  # NCCL's blocks the stream, not this thread
        end.record()
        while not end.query():
            if time.monotonic() >= deadline:
                raise _Stopped(step, "it did not end in time")
            time.sleep(_POLL_SECONDS)
        return float(begin.elapsed_time(end)) / 1e3
    except RuntimeError as error:
        raise _Stopped(step, first_line(error)) from None
