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

# torch's own time-outs lie beyond the trial's deadline: if they fired first they would destroy the evidence.
_BEYOND_DEADLINE_SECONDS = 60.0


def group_timeout(ctx: Context) -> timedelta:
    """The time-out to give to torch: beyond this trial, and beyond later ones of the run, which may share the group."""
    return timedelta(seconds=max(ctx.trial.limit_seconds, ctx.options.budget_seconds) + _BEYOND_DEADLINE_SECONDS)


def unknown_backend(backend: str) -> AbsentBackend | None:
    """The reason why this torch has no such backend, or None; backends of others must be registered first."""
    dist.is_backend_available(backend)  # from torch 2.15 on this registers other classes of its own, such as nccl2
    # The list has names that were not built in; `fake` moves nothing.
    listed = [name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")]
    known = [name for name in listed if dist.is_backend_available(name)]
    if backend in known:
        return None
    if backend in listed:
        return AbsentBackend(f"torch {torch.__version__} was built without {backend}; it has {', '.join(known)}")
    return AbsentBackend(f"torch {torch.__version__} knows no backend {backend}, only {', '.join(known)}")


# NCCL's own log: all of these are names since NCCL 2.18, but for BOOTSTRAP (2.21), which older ones skip (debug.cc).
_LOGGED = "INIT,BOOTSTRAP,ENV,GRAPH,NET,P2P,SHM,NVLS"
# A line for each collective, on rank 0: a benchmark of many thousand calls goes without.
_LOGGED_CALLS = ",TUNING"
# Backends whose group over all ranks is open in this worker; one at most.
_kept: set[str] = set()


@contextmanager
def process_group(ctx: Context, backend: str) -> Iterator[torch.device]:
    """The default group over the trial's group of ranks; yields this rank's device.

    A group over all ranks stays open, and the next trial over all ranks shares it, with its communicator: making one
    takes NCCL seconds. Rank 0 replaces the workers where not every rank has it, or where another group is needed
    (`KeptGroup`). Groups of gloo are closed: they are open in milliseconds, and would be in the way of NCCL's.
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
    if backend in _kept:
        _kept.remove(backend)
        ctx.barrier()
    else:
        _open_group(ctx, backend, device)
        connect(ctx, device)
    yield device
    # After a failure it is neither kept nor closed: closing may wait for peers, and an error would become a hang. That
    # worker is replaced anyway.
    if backend != "gloo" and len(ctx.group) == ctx.place.world_size:
        _kept.add(backend)
    else:
        ctx.step("destroy_process_group")
        close_group()


def _open_group(ctx: Context, backend: str, device: torch.device) -> None:
    """Open the default group, with a store of its own."""
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
        # NCCL then creates its communicator here and not in the first collective.
        device_id=device if backend.startswith("nccl") else None,
    )
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    if backend != "gloo":
        ctx.timed("communicator", seconds)


def nccl_log(ctx: Context) -> Path:
    """The file of this worker in which NCCL writes its log."""
    return Path(ctx.scratch) / f"nccl-{os.getpid()}.log"


def _start_log(ctx: Context) -> None:
    """Let NCCL write its log: it costs a healthy job nothing, and shows the paths between the ranks.

    NCCL reads these variables once in a process, with its first message; a user's own values are for the job.
    """
    per_call = _LOGGED_CALLS if ctx.options.bench is None else ""
    # NCCL expands %h and %p in the name.
    file = str(nccl_log(ctx)).replace("%", "%%")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=_LOGGED + per_call, NCCL_DEBUG_FILE=file)


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
    """Seconds until the group stood, and keys of torch that the agent's store held before (rank 0 looks)."""

    seconds: float
    stale: tuple[str, ...] = ()


def meet(ctx: Context, method: str, backend: str, nonce: str) -> Meeting:
    """Open the default group as `method` says, pass a barrier, and close it.

    `method` is tcp, env or file; a folder in the shared directory whose name ends with `nonce` is the run's own.
    The barrier comes before the rendezvous, so the seconds are the rendezvous' own.
    """
    choose_device(backend, ctx.place.local_rank)
    if method == "env" and ctx.trial.params.get("agent_store"):
        return _by_agent(ctx, backend)
    return Meeting(_passed(ctx, _by_url(ctx, method, backend, nonce)))


def _passed(ctx: Context, begin: float) -> float:
    """Seconds since `begin`; then a barrier, and the end of the group."""
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    work = dist.barrier(async_op=True)
    ctx.step("barrier: wait")
    if work is not None:
        work.wait()
    ctx.step("destroy_process_group")
    close_group()
    return seconds


# The keys of torch's default group begin with it, behind the prefix of an attempt in older versions.
_DEFAULT_GROUP = "default_pg/"
# Names of so many keys say what is there.
_KEYS_SHOWN = 3


def _by_agent(ctx: Context, backend: str) -> Meeting:
    """Through the store of torchrun's agent, as the job does it.

    The agent keeps all keys of an attempt in one store: whoever opens a group in it after another process reads the
    addresses of that one. So the keys of a trial have a prefix that no other process has, and rank 0 deletes them.
    """
    prefix = f"ddpdiag-{ctx.barrier(os.urandom(8).hex() if ctx.group_rank == 0 else '').offer}"
    timeout = group_timeout(ctx)
    begin = time.perf_counter()
    ctx.step("init_process_group env://")
    with _agent_store():
        store, rank, size = next(rendezvous("env://", ctx.group_rank, len(ctx.group), timeout=timeout))
    keys = _keys(store) if rank == 0 else []
    stale = [key for key in keys if _DEFAULT_GROUP in key and not key.startswith("ddpdiag-")]
    dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timeout)
    seconds = _passed(ctx, begin)
    for key in _keys(store) if rank == 0 else ():
        if key.startswith(prefix):
            store.delete_key(key)
    return Meeting(seconds, tuple(sorted(stale)[:_KEYS_SHOWN]))


def _keys(store: dist.Store) -> list[str]:
    """All keys, whatever their prefix; nothing where this torch cannot list them (before 2.9)."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return list(store.list_keys()) if hasattr(store, "list_keys") else []


def _by_url(ctx: Context, method: str, backend: str, nonce: str) -> float:
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
    # What init_process_group(init_method=url) does, with a prefix for each trial: a process that serves the store of
    # two groups on one port keeps the keys of the first.
    store, rank, size = next(rendezvous(url, ctx.group_rank, len(ctx.group), timeout=timeout))
    own = dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    return begin


def _opening(ctx: Context) -> Opening:
    """The address where rank 0 will listen; another process may take its port in between, as in every job."""
    return ctx.barrier(str(free_port(ports=allowed_ports(ctx.options))) if ctx.group_rank == 0 else "")


def _fresh_file(ctx: Context, nonce: str) -> str:
    """Its path, also as a part of a URL: a stale one of an earlier job makes ranks connect to the dead.

    By a descriptor of its folder, which stays open: other users may write to the one above it, and the name of $TMPDIR
    is no matter of the job.
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
def _agent_store() -> Iterator[None]:
    before = os.environ.get(_AGENT_STORE)
    os.environ[_AGENT_STORE] = "True"
    try:
        yield
    finally:
        del os.environ[_AGENT_STORE]
        if before is not None:
            os.environ[_AGENT_STORE] = before
