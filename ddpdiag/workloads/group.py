"""Opening and closing the process group of a trial.

The group's first rank opens a store on a free port, the gate hands its address to the others, and only then do they
connect: without the gate c10d's client retries with growing pauses, which costs half a second per group (measured,
torch 2.13, loopback).
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpdiag.errors import AbsentBackend, UnknownBackend
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONTEXT_STEP, Context
from ddpdiag.probes.net.tcp_connect import allowed_ports
from ddpdiag.workloads.devices import choose_device

# torch's own time-outs lie beyond the trial's deadline: if they fired first they would destroy the evidence.
_BEYOND_DEADLINE_SECONDS = 60.0


def group_timeout(ctx: Context) -> timedelta:
    """The time-out to give to torch for this trial."""
    return timedelta(seconds=ctx.trial.limit_seconds + _BEYOND_DEADLINE_SECONDS)


def unknown_backend(backend: str) -> AbsentBackend | None:
    """Why this torch has no such backend, or None: others than its own must be registered before they are named."""
    # The list has names that were not built in; `fake` moves nothing.
    listed = [name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")]
    known = [name for name in listed if dist.is_backend_available(name)]
    if backend in known:
        return None
    if backend in listed:
        return AbsentBackend(f"torch {torch.__version__} was built without {backend}; it has {', '.join(known)}")
    return UnknownBackend(f"torch {torch.__version__} knows no backend {backend}, only {', '.join(known)}")


@contextmanager
def process_group(ctx: Context, backend: str) -> Iterator[torch.device]:
    """The default group over the trial's group of ranks, with a store of its own; yields this rank's device.

    AbsentBackend where torch has no such backend.
    """
    if (unknown := unknown_backend(backend)) is not None:
        raise unknown
    ctx.step(f"choose a device for {backend}" if backend == "gloo" else CONTEXT_STEP)
    begin = time.perf_counter()
    device = choose_device(backend, ctx.place.local_rank)
    if device.type != "cpu":
        torch.zeros(1, device=device).cpu()  # the first kernel: CUDA creates its context, and loads, when it must
    ctx.timed("context", time.perf_counter() - begin)
    store = open_store(ctx)
    begin = time.perf_counter()
    ctx.step(f"init_process_group {backend}" if backend == "gloo" else COMMUNICATOR_STEP)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store),
        rank=ctx.group_rank,
        world_size=len(ctx.group),
        timeout=group_timeout(ctx),
        # NCCL then creates its communicator here and not in the first collective.
        device_id=device if backend == "nccl" else None,
    )
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    if backend != "gloo":
        ctx.timed("communicator", seconds)
    yield device
    # Not after a failure: closing may wait for peers, and an error would become a hang. That worker is replaced anyway.
    ctx.step("destroy_process_group")
    close_group()


def close_group() -> None:
    """Destroy the default group, its backend last and without the GIL.

    A thread of gloo that drops the last reference to a tensor needs the GIL. In torch 2.6 and 2.7 the destructor of the
    group waits for that thread and keeps the GIL: a deadlock (2.9 has none). The destructor of the backend's own Python
    object releases the GIL (IntrusivePtrNoGilDestructor in torch's init.cpp), so that object must be the last one.
    """
    group = dist.group.WORLD
    # A backend that is written in Python is itself the group, and has no other object.
    backends = [] if group is None else [group._get_backend(device) for device in group._device_types]
    del group
    dist.destroy_process_group()
    backends.clear()


def open_store(ctx: Context) -> dist.Store:
    """The group's store: served by the first rank, on any free port (or one that `--port-range` allows)."""
    size, timeout = len(ctx.group), group_timeout(ctx)
    if ctx.group_rank == 0:
        ctx.step("open the store")
        store = _serve(size, timeout, allowed_ports(ctx.options))
        ctx.barrier(str(store.port))
        return store
    opening = ctx.barrier()
    ctx.step(f"connect to the store at {opening.host}:{opening.offer}")
    return dist.TCPStore(opening.host, int(opening.offer), size, False, timeout, wait_for_workers=False)


def _serve(size: int, timeout: timedelta, ports: Iterable[int]) -> dist.TCPStore:
    error: RuntimeError | None = None
    for port in ports:
        try:
            return dist.TCPStore("localhost", port, size, True, timeout, wait_for_workers=False)
        except RuntimeError as busy:  # c10d's DistNetworkError: address already in use
            error = busy
    raise error or RuntimeError("no port to serve a store on")
