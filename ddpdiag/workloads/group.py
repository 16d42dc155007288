"""Opening, keeping and closing the process group of a trial.

The group's first rank opens a store on a free port, the barrier hands its address to the others, and only then do they
connect: without the barrier c10d's client retries with growing pauses, which costs half a second per group (measured,
torch 2.13, loopback).
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ddpdiag.errors import AbsentBackend
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONTEXT_STEP, Context, Opening
from ddpdiag.probes.host.shared_files import open_private_folder, unfit_for_url
from ddpdiag.probes.net.tcp_connect import allowed_ports, free_port
from ddpdiag.workloads.collectives import connect
from ddpdiag.workloads.devices import choose_device

# torch's time-outs end this long after the trial's deadline: an earlier one would destroy the evidence of a hang.
_BEYOND_DEADLINE_SECONDS = 60.0


def group_timeout(ctx: Context) -> timedelta:
    """The time-out for torch: longer than this trial, and than the run, whose later trials may share the group."""
    return timedelta(seconds=max(ctx.trial.limit_seconds, ctx.options.budget_seconds) + _BEYOND_DEADLINE_SECONDS)


def unknown_backend(backend: str) -> AbsentBackend | None:
    """The reason why this torch has no such backend, or None. Backends of other packages must be registered before."""
    dist.is_backend_available(backend)  # from torch 2.15 on this call registers more backends of torch, such as nccl2
    # The list also has backends that this torch was built without. `fake` transfers nothing.
    listed = [name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")]
    known = [name for name in listed if dist.is_backend_available(name)]
    if backend in known:
        return None
    if backend in listed:
        return AbsentBackend(f"torch {torch.__version__} was built without {backend}; it has {', '.join(known)}")
    return AbsentBackend(f"torch {torch.__version__} knows no backend {backend}, only {', '.join(known)}")


# Subsystems for NCCL's log: NCCL knows them since 2.18, and BOOTSTRAP since 2.21; older versions skip it (debug.cc).
_LOGGED = "INIT,BOOTSTRAP,ENV,GRAPH,NET,P2P,SHM,NVLS"
# It logs a line for each collective on rank 0, and is left out in a benchmark, which has many thousand calls.
_LOGGED_CALLS = ",TUNING"
# The backend whose group over all ranks is still open in this worker; at most one.
_kept: set[str] = set()


@contextmanager
def process_group(ctx: Context, backend: str) -> Iterator[torch.device]:
    """Open the default process group over the trial's group of ranks, and yield this rank's device.

    A group over all ranks stays open, and the next trial over all ranks shares it with its communicator, which takes
    NCCL seconds to create. Rank 0 replaces the workers if not every rank has this group, or if another one is needed
    (`KeptGroup`). Groups of gloo are closed: they open in milliseconds, and an open one would prevent a group of NCCL.
    Raises AbsentBackend if torch has no such backend.
    """
    if (unknown := unknown_backend(backend)) is not None:
        raise unknown
    ctx.step(f"choose a device for {backend}" if backend == "gloo" else CONTEXT_STEP)
    begin = time.perf_counter()
    device = choose_device(backend, ctx.place.local_rank)
    if device.type != "cpu":
        torch.zeros(1, device=device).cpu()  # the first kernel: CUDA creates its context, and loads, when it must
    ctx.timed("context", time.perf_counter() - begin)
    if backend in _kept:
        _kept.remove(backend)
        ctx.barrier()
    else:
        _open_group(ctx, backend, device)
        connect(ctx, device)
    yield device
    # After an exception the group is neither kept nor closed: closing may wait for peers, and an error would become a
    # hang. Rank 0 replaces that worker anyway.
    if backend != "gloo" and len(ctx.group) == ctx.place.world_size:
        _kept.add(backend)
    else:
        ctx.step("destroy_process_group")
        close_group()


def _open_group(ctx: Context, backend: str, device: torch.device) -> None:
    """Open the default group with a new store."""
    store = open_store(ctx)
    if backend != "gloo" and len(ctx.group) > 1:
        _start_log(ctx)
    begin = time.perf_counter()
    ctx.step(f"init_process_group {backend}" if backend == "gloo" else COMMUNICATOR_STEP)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store),
        rank=ctx.group_rank,
        world_size=len(ctx.group),
        timeout=group_timeout(ctx),
        # With a device_id, NCCL creates its communicator in this call and not in the first collective.
        device_id=device if backend.startswith("nccl") else None,
    )
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    if backend != "gloo":
        ctx.timed("communicator", seconds)


def nccl_log(ctx: Context) -> Path:
    """The file for NCCL's log of this worker."""
    return Path(ctx.scratch) / f"nccl-{os.getpid()}.log"


def _start_log(ctx: Context) -> None:
    """Set the variables that make NCCL write its log, which shows the paths between the ranks and takes no time.

    NCCL reads them once in a process, with its first message. The user's values, meant for the job, are overwritten.
    """
    per_call = _LOGGED_CALLS if ctx.options.bench is None else ""
    # NCCL would replace %h and %p in the name of the file.
    file = str(nccl_log(ctx)).replace("%", "%%")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=_LOGGED + per_call, NCCL_DEBUG_FILE=file)


def close_group() -> None:
    """Destroy the default group, its backend last and without the GIL.

    A thread of gloo that drops the last reference to a tensor needs the GIL. In torch 2.6 and 2.7 the destructor of the
    group waits for that thread and keeps the GIL: a deadlock (2.9 has none). The destructor of the backend's own Python
    object releases the GIL (IntrusivePtrNoGilDestructor in torch's init.cpp), so that object must be the last one.
    """
    group = dist.group.WORLD
    # For a backend written in Python, the backend's object is the group itself.
    backends = [] if group is None else [group._get_backend(device) for device in group._device_types]
    del group
    dist.destroy_process_group()
    backends.clear()


def open_store(ctx: Context) -> dist.Store:
    """Open the group's store: its first rank serves it on a free port (of `--port-range`), the others connect to it."""
    size, timeout = len(ctx.group), group_timeout(ctx)
    if ctx.group_rank == 0:
        ctx.step("open the store")
        error: RuntimeError | None = None
        for port in allowed_ports(ctx.options):
            try:
                store = dist.TCPStore("localhost", port, size, True, timeout, wait_for_workers=False)
            except RuntimeError as busy:  # c10d's DistNetworkError: address already in use
                error = busy
                continue
            ctx.barrier(str(store.port))
            return store
        raise error or RuntimeError("no port to serve a store on")
    opening = ctx.barrier()
    ctx.step(f"connect to the store at {opening.host}:{opening.offer}")
    return dist.TCPStore(opening.host, int(opening.offer), size, False, timeout, wait_for_workers=False)


_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Meeting(NamedTuple):
    """Seconds until the group was open, and on rank 0 up to 3 keys of an earlier group in the agent's store."""

    seconds: float
    stale: tuple[str, ...] = ()


def meet(ctx: Context, method: str, backend: str, nonce: str) -> Meeting:
    """Open the default group with a rendezvous by `method` ("tcp", "env" or "file"), run a barrier, and close it.

    Files are created in the folder of the shared directory whose name ends with `nonce`, if there is one.
    Before the rendezvous the ranks wait for each other, so `seconds` are those of the rendezvous alone.
    """
    choose_device(backend, ctx.place.local_rank)
    if method == "env" and ctx.trial.params.get("agent_store"):
        return _meet_by_agent(ctx, backend)
    return Meeting(_pass_barrier(ctx, _open_by_url(ctx, method, backend, nonce)))


def _pass_barrier(ctx: Context, begin: float) -> float:
    """Run a barrier in the group that was just opened, and close it. Returns the seconds from `begin` to this call."""
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    work = dist.barrier(async_op=True)
    ctx.step("barrier: wait")
    if work is not None:
        work.wait()
    ctx.step("destroy_process_group")
    close_group()
    return seconds


# The keys of torch's default group begin with this, in older versions after the prefix of torchrun's attempt.
_DEFAULT_GROUP = "default_pg/"
# The most keys of an earlier group that are reported.
_KEYS_SHOWN = 3


def _meet_by_agent(ctx: Context, backend: str) -> Meeting:
    """Open the group through the store of torchrun's agent, as the job does, run a barrier, and close the group.

    The agent keeps all keys of an attempt in one store. A process that opens a group in it reads the addresses of any
    earlier group. So the keys of a trial have a random prefix, and rank 0 deletes them at the end.
    """
    prefix = f"ddpdiag-{ctx.barrier(os.urandom(8).hex() if ctx.group_rank == 0 else '').offer}"
    timeout = group_timeout(ctx)
    begin = time.perf_counter()
    ctx.step("init_process_group env://")
    with _using_agent_store():
        store, rank, size = next(rendezvous("env://", ctx.group_rank, len(ctx.group), timeout=timeout))
    keys = _keys(store) if rank == 0 else []
    stale = [key for key in keys if _DEFAULT_GROUP in key and not key.startswith("ddpdiag-")]
    dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timeout)
    seconds = _pass_barrier(ctx, begin)
    for key in _keys(store) if rank == 0 else ():
        if key.startswith(prefix):
            store.delete_key(key)
    return Meeting(seconds, tuple(sorted(stale)[:_KEYS_SHOWN]))


def _keys(store: dist.Store) -> list[str]:
    """All keys of a store, with any prefix; an empty list if this torch cannot list them (before 2.9)."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return list(store.list_keys()) if hasattr(store, "list_keys") else []


def _open_by_url(ctx: Context, method: str, backend: str, nonce: str) -> float:
    """Open the default group as init_method does; return when the rendezvous began, by time.perf_counter()."""
    if method == "file":
        url = f"file://{_fresh_file(ctx, nonce)}"
    elif method == "env":
        ctx.barrier()
        url = "env://"
    else:
        opening = _opening(ctx)
        host = f"[{opening.host}]" if ":" in opening.host else opening.host
        url = f"tcp://{host}:{opening.offer}"
    begin = time.perf_counter()
    ctx.step(f"init_process_group {method}://")
    timeout = group_timeout(ctx)
    # As init_process_group(init_method=url) does, but with a prefix for each trial: a process that serves the stores of
    # two groups on one port would still have the keys of the first.
    store, rank, size = next(rendezvous(url, ctx.group_rank, len(ctx.group), timeout=timeout))
    own = dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    return begin


def _opening(ctx: Context) -> Opening:
    """Agree on the address at which rank 0 will listen. Another process may take the port first, as in every job."""
    return ctx.barrier(str(free_port(ports=allowed_ports(ctx.options))) if ctx.group_rank == 0 else "")


def _fresh_file(ctx: Context, nonce: str) -> str:
    """Agree on the path of a new rendezvous file. With a file of an earlier job ranks would connect to ended processes.

    The path, which becomes a part of a URL, names the folder by an open descriptor in two cases: in the shared
    directory, since other users may write to the folder above it, and if the folder's name is not fit for a URL.
    """
    folder = Path(ctx.options.shared_dir or ctx.scratch)
    if nonce and ctx.group_rank == 0:
        mine = (path for path in folder.glob(f"ddpdiag-*-{nonce}") if path.lstat().st_uid == os.geteuid())
        folder = next(mine, folder)
    name = f"ddpdiag-rendezvous-{os.getpid()}-{ctx.trial.number}"
    path = Path(ctx.barrier(str(folder.absolute() / name) if ctx.group_rank == 0 else "").offer)
    if nonce:
        return f"/proc/self/fd/{open_private_folder(path.parent)}/{path.name}"
    if unfit_for_url(str(path)) is None:
        return str(path)
    return f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)}/{path.name}"


@contextmanager
def _using_agent_store() -> Iterator[None]:
    before = os.environ.get(_AGENT_STORE)
    os.environ[_AGENT_STORE] = "True"
    try:
        yield
    finally:
        del os.environ[_AGENT_STORE]
        if before is not None:
            os.environ[_AGENT_STORE] = before
