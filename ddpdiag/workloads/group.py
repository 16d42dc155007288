"""Opening, keeping and closing the process group of a trial.

The group's first rank opens a store on a free port. `Context.barrier` sends the store's address to the other ranks,
which connect only then. Without the barrier torch's client would retry with growing pauses, which costs half a second
per group (measured, torch 2.13, loopback).
"""

import ctypes
import os
import sys
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
from ddpdiag.evidence.nccl_diagnostics import RAS_BEGIN, RAS_END, Diagnostic, parse_diagnostics
from ddpdiag.model import Depth
from ddpdiag.model.trial import COMMUNICATOR_STEP, CONTEXT_STEP, Context
from ddpdiag.probes.host.shared_files import open_private_folder, unusable_url_character
from ddpdiag.probes.net.nccl_log import MAX_BYTES
from ddpdiag.probes.net.tcp_connect import allowed_ports, free_port
from ddpdiag.workloads.collectives import connect
from ddpdiag.workloads.devices import choose_device

# torch's time-outs end this long after the trial's deadline: an earlier time-out would destroy the evidence of a hang.
_BEYOND_DEADLINE_SECONDS = 60.0
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# The keys of torch's default group begin with this, in older versions after the prefix of torchrun's attempt.
_DEFAULT_GROUP_KEY = "default_pg/"
# RAS prints its report after the communicator is made, from its own thread.
_MAX_REPORT_SECONDS = 0.5
# The most keys of an earlier group that are reported.
_MAX_STALE_KEYS = 3


def group_timeout(ctx: Context) -> timedelta:
    """The time-out of a group: longer than this trial and the run, because later trials may share the group."""
    return timedelta(seconds=max(ctx.trial.limit_seconds, ctx.options.budget_seconds) + _BEYOND_DEADLINE_SECONDS)


def backend_error(backend: str) -> AbsentBackend | None:
    """Return an error if torch has no such backend, else None. Call it after packages registered their backends."""
    dist.is_backend_available(backend)  # from torch 2.15 on this call registers more backends of torch, such as nccl2
    # `backend_list` also names backends that this torch was built without. `fake` transfers nothing.
    listed = [name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")]
    available = [name for name in listed if dist.is_backend_available(name)]
    if backend in available:
        return None
    if backend in listed:
        return AbsentBackend(f"torch {torch.__version__} was built without {backend}; it has {', '.join(available)}")
    return AbsentBackend(f"torch {torch.__version__} knows no backend {backend}, only {', '.join(available)}")


# Subsystems in NCCL's log: NCCL has them since 2.18, and BOOTSTRAP since 2.21; older versions ignore it (debug.cc).
_LOG_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,GRAPH,NET,P2P,SHM,NVLS"
# TUNING logs a line for each collective on rank 0. A benchmark has many thousand calls, so it is omitted there.
_LOG_SUBSYSTEM_OF_CALLS = ",TUNING"
# The backend whose group over all ranks this worker keeps open for the next trial: none or one.
_kept_backends: set[str] = set()


@contextmanager
def process_group(ctx: Context, backend: str, *, diagnoses: bool = False) -> Iterator[torch.device]:
    """Open the default process group over the trial's group of ranks, and yield this rank's device.

    Unless the backend is gloo, a group over all ranks stays open. The next trial over all ranks shares the group and
    its communicator, which NCCL needs seconds to create. Rank 0 replaces the workers if a rank does not have the group,
    or if a trial needs another group (`KeptGroup`). Groups of gloo are closed: they open in milliseconds, and an open
    group of gloo would prevent one of NCCL. With `diagnoses`, NCCL runs its diagnostics if a group is opened. Raises
    AbsentBackend if torch has no such backend.
    """
    if (absent := backend_error(backend)) is not None:
        raise absent
    ctx.step(f"choose a device for {backend}" if backend == "gloo" else CONTEXT_STEP)
    begin = time.perf_counter()
    device = choose_device(backend, ctx.place.local_rank)
    if device.type != "cpu":
        torch.zeros(1, device=device).cpu()  # the first kernel, for which CUDA creates its context and loads code
    ctx.add_timing("context", time.perf_counter() - begin)
    if backend in _kept_backends:
        _kept_backends.remove(backend)
        ctx.barrier()
    else:
        _open_group(ctx, backend, device, diagnoses=diagnoses)
        connect(ctx, device)
    yield device
    # After an exception the group is neither kept nor closed: closing may wait for peers, and an error would become a
    # hang. Rank 0 replaces that worker anyway.
    if backend != "gloo" and len(ctx.group) == ctx.place.world_size:
        _kept_backends.add(backend)
    else:
        ctx.step("destroy_process_group")
        close_group()


def _open_group(ctx: Context, backend: str, device: torch.device, *, diagnoses: bool) -> None:
    store = open_store(ctx)
    if backend != "gloo" and len(ctx.group) > 1:
        _enable_nccl_log(ctx)
        _set_diagnostics(ctx, is_on=diagnoses)
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
    _set_diagnostics(ctx, is_on=False)
    seconds = time.perf_counter() - begin
    ctx.add_timing("group", seconds)
    if backend != "gloo":
        ctx.add_timing("communicator", seconds)


def nccl_log_file(ctx: Context) -> Path:
    return Path(ctx.scratch) / f"nccl-{os.getpid()}.log"


def _enable_nccl_log(ctx: Context) -> None:
    """Set the variables with which NCCL logs the paths between the ranks. Logging takes no measurable time.

    NCCL reads the variables once in a process, at its first message. The user's own values are overwritten.
    """
    per_call = _LOG_SUBSYSTEM_OF_CALLS if ctx.options.bench is None else ""
    # NCCL would replace %h and %p in the name of the file.
    file = str(nccl_log_file(ctx)).replace("%", "%%")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=_LOG_SUBSYSTEMS + per_call, NCCL_DEBUG_FILE=file)


def _set_diagnostics(ctx: Context, *, is_on: bool) -> None:
    """Turn on NCCL's diagnostics for the next communicator, or off. NCCL before 2.31 ignores these variables.

    The diagnostics of RAS compare what the ranks know (12 ms for 8 ranks, NCCL's user guide). The active ones copy data
    between all GPUs of a host (245 ms for 8 GPUs). On several hosts they also start ib_write_bw, whose time-outs are
    longer than a quick run may take.
    """
    is_one_host = ctx.place.local_world_size == ctx.place.world_size
    is_active = is_on and (is_one_host or ctx.options.depth is not Depth.QUICK)
    os.environ.update(
        NCCL_RUN_RAS_DIAGNOSTICS=f"{is_on:d}",
        NCCL_RUN_DIAGNOSTICS=f"{is_active:d}",
        # Otherwise NCCL would keep the first values for all later communicators of this process (src/param/param.cc).
        NCCL_NO_CACHE="NCCL_RUN_RAS_DIAGNOSTICS,NCCL_RUN_DIAGNOSTICS",
    )


def read_diagnostics(ctx: Context) -> tuple[Diagnostic, ...]:
    """Return NCCL's diagnostics in this worker: from its log, and from standard output, where it prints reports."""
    end = time.monotonic() + _MAX_REPORT_SECONDS
    while RAS_BEGIN in (printed := _standard_output()) and RAS_END not in printed and time.monotonic() < end:
        time.sleep(0.02)
    try:
        with nccl_log_file(ctx).open("rb") as file:
            log = file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        log = ""
    return parse_diagnostics(f"{printed}\n{log}", ctx.group)


def _standard_output() -> str:
    """Return the output of this worker, which is a file, with what the C library has buffered; else ""."""
    ctypes.CDLL(None).fflush(None)
    try:
        return os.pread(sys.stdout.fileno(), MAX_BYTES, 0).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def close_group() -> None:
    """Destroy the default group, and the Python object of the group's backend last, to avoid a deadlock.

    In torch 2.6 and 2.7 the destructor of the group holds the GIL and waits for gloo's threads. Such a thread needs the
    GIL to drop the last reference to a tensor: a deadlock (2.9 has none). The destructor of the backend's Python object
    releases the GIL (IntrusivePtrNoGilDestructor in torch's init.cpp), so this object must be destroyed last.
    """
    group = dist.group.WORLD
    # For a backend written in Python, the backend's object is the group itself.
    backends = [] if group is None else [group._get_backend(device) for device in group._device_types]
    del group
    dist.destroy_process_group()
    backends.clear()


def open_store(ctx: Context) -> dist.Store:
    """Open the group's store: the first rank serves it on a free port (of `--port-range`), the other ranks connect."""
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
    ctx.step(f"connect to the store at {opening.address}:{opening.offer}")
    return dist.TCPStore(opening.address, int(opening.offer), size, False, timeout, wait_for_workers=False)


class RendezvousResult(NamedTuple):
    """The seconds until the group was open, and on rank 0 up to 3 keys of an earlier group in the agent's store."""

    seconds: float
    stale_keys: tuple[str, ...] = ()


def try_rendezvous(ctx: Context, method: str, backend: str, nonce: str) -> RendezvousResult:
    """Open the default group with a rendezvous by `method` ("tcp", "env" or "file"), run a barrier, close the group.

    The ranks first wait for each other, so `seconds` is the time of the rendezvous alone. If `nonce` is not empty,
    method "file" creates its file in the folder of the shared directory whose name ends with `nonce`.
    """
    choose_device(backend, ctx.place.local_rank)
    if method == "env" and ctx.trial.params.get("agent_store"):
        return _try_agent_store(ctx, backend)
    return RendezvousResult(_run_barrier_and_close(ctx, _open_by_url(ctx, method, backend, nonce)))


def _run_barrier_and_close(ctx: Context, begin: float) -> float:
    """Run a barrier in the open group, and close the group. Returns the seconds between `begin` and the barrier."""
    seconds = time.perf_counter() - begin
    ctx.add_timing("group", seconds)
    work = dist.barrier(async_op=True)
    ctx.step("barrier: wait")
    work.wait()
    ctx.step("destroy_process_group")
    close_group()
    return seconds


def _try_agent_store(ctx: Context, backend: str) -> RendezvousResult:
    """Open the group through the store of torchrun's agent, as the job does, run a barrier, and close the group.

    The agent keeps all keys of an attempt in one store. A process that opens a group in this store would read the
    addresses of an earlier group. So the keys of a trial have a random prefix, and rank 0 deletes them at the end.
    """
    prefix = f"ddpdiag-{ctx.barrier(os.urandom(8).hex() if ctx.group_rank == 0 else '').offer}"
    timeout = group_timeout(ctx)
    begin = time.perf_counter()
    ctx.step("init_process_group env://")
    os.environ[_AGENT_STORE] = "True"  # then torch's env:// rendezvous uses the agent's store
    try:
        store, rank, size = next(rendezvous("env://", ctx.group_rank, len(ctx.group), timeout=timeout))
    finally:
        del os.environ[_AGENT_STORE]
    keys = _keys(store) if rank == 0 else []
    stale_keys = [key for key in keys if _DEFAULT_GROUP_KEY in key and not key.startswith("ddpdiag-")]
    dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timeout)
    seconds = _run_barrier_and_close(ctx, begin)
    for key in _keys(store) if rank == 0 else ():
        if key.startswith(prefix):
            store.delete_key(key)
    return RendezvousResult(seconds, tuple(sorted(stale_keys)[:_MAX_STALE_KEYS]))


def _keys(store: dist.Store) -> list[str]:
    """All keys of a store, whatever their prefix. Empty if this torch cannot list keys (before 2.9)."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return list(store.list_keys()) if hasattr(store, "list_keys") else []


def _open_by_url(ctx: Context, method: str, backend: str, nonce: str) -> float:
    """Open the default group as `init_method` does. Returns the time.perf_counter() of the rendezvous's beginning."""
    if method == "file":
        url = f"file://{_agree_on_new_file(ctx, nonce)}"
    elif method == "env":
        ctx.barrier()
        url = "env://"
    else:
        # As in every job, another process may take the port before rank 0 listens on it.
        opening = ctx.barrier(str(free_port(ports=allowed_ports(ctx.options))) if ctx.group_rank == 0 else "")
        host = f"[{opening.address}]" if ":" in opening.address else opening.address
        url = f"tcp://{host}:{opening.offer}"
    begin = time.perf_counter()
    ctx.step(f"init_process_group {method}://")
    timeout = group_timeout(ctx)
    # As init_process_group(init_method=url) does, but with a prefix for each trial: a process that serves the stores of
    # two groups on one port would still have the keys of the first.
    store, rank, size = next(rendezvous(url, ctx.group_rank, len(ctx.group), timeout=timeout))
    prefixed_store = dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store)
    dist.init_process_group(backend, store=prefixed_store, rank=rank, world_size=size, timeout=timeout)
    return begin


def _agree_on_new_file(ctx: Context, nonce: str) -> str:
    """Agree on the path of a new rendezvous file: an earlier job's file would contain addresses of ended processes.

    The path becomes a part of a URL. It names the folder by an open descriptor in two cases: if `nonce` is set, because
    other users may write to the directory above the folder, and if the folder's name does not fit into a URL.
    """
    folder = Path(ctx.options.shared_dir or ctx.scratch)
    if nonce and ctx.group_rank == 0:
        own_folders = (path for path in folder.glob(f"ddpdiag-*-{nonce}") if path.lstat().st_uid == os.geteuid())
        folder = next(own_folders, folder)
    name = f"ddpdiag-rendezvous-{os.getpid()}-{ctx.trial.number}"
    path = Path(ctx.barrier(str(folder.absolute() / name) if ctx.group_rank == 0 else "").offer)
    if nonce:
        return f"/proc/self/fd/{open_private_folder(path.parent)}/{path.name}"
    if unusable_url_character(str(path)) is None:
        return str(path)
    return f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)}/{path.name}"
