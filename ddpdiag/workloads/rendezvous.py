"""The ways in which a job's processes find each other: tcp://, env://, file://, a store of one's own, and MPI."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ddpdiag.model.trial import Context
from ddpdiag.probes.net.tcp_connect import allowed_ports, free_port
from ddpdiag.workloads.devices import choose_device
from ddpdiag.workloads.group import close_group, group_timeout

# What mpirun of one kind or another tells its processes by (see runtime/launchers/launch.py).
_OF_MPI = ("openmpi", "pmix", "pmi")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def meet(ctx: Context, method: str, backend: str, nonce: str) -> float:
    """Open the default group as `method` says, pass a barrier, close it; seconds until the group stood.

    `method` is tcp, env or file, the name of one of torch's stores, or mpi; a folder in the shared directory whose name
    ends with `nonce` is the run's own. The gate stands before the rendezvous, so the seconds are the rendezvous' own.
    """
    choose_device("gloo" if method == "mpi" else backend, ctx.place.local_rank)
    if method in ("tcp", "env", "file"):
        begin = _by_url(ctx, method, backend, nonce)
    elif method == "mpi":
        begin = _by_mpi(ctx)
    else:
        begin = _by_store(ctx, method, backend, nonce)
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    work = dist.barrier(async_op=True)
    ctx.step("barrier: wait")
    if work is not None:
        work.wait()
    ctx.step("destroy_process_group")
    close_group()
    return seconds


def _by_url(ctx: Context, method: str, backend: str, nonce: str) -> float:
    url, environment = _file(ctx, nonce) if method == "file" else _PREPARE[method](ctx)
    begin = time.perf_counter()
    ctx.step(f"init_process_group {method}://")
    with _variables(environment):
        # What init_process_group(init_method=url) does, with a prefix for each trial: torchrun's agent keeps the keys
        # of all of them in one store (torch 2.13 adds no prefix), and a second trial would read the first one's.
        store, rank, size = next(rendezvous(url, ctx.group_rank, len(ctx.group), timeout=group_timeout(ctx)))
        own = dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=group_timeout(ctx))
    return begin


def _by_store(ctx: Context, name: str, backend: str, nonce: str) -> float:
    """As scripts do it that bring a store of their own: it takes the place of the address."""
    rank, size, timeout = ctx.group_rank, len(ctx.group), group_timeout(ctx)
    store: dist.Store
    if name == "HashStore":  # of threads in one process
        ctx.barrier()
        begin = time.perf_counter()
        store = dist.HashStore()
    elif name == "FileStore":
        path = _file(ctx, nonce)[0].removeprefix("file://")
        begin = time.perf_counter()
        store = dist.FileStore(path, size)
    else:
        opening = ctx.barrier(str(free_port(ports=allowed_ports(ctx.options))) if rank == 0 else "")
        begin = time.perf_counter()
        ctx.step("open the TCPStore")
        store = dist.TCPStore(opening.host, int(opening.offer), size, rank == 0, timeout)
    ctx.step(f"init_process_group store={name}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return begin


def without_mpi(ctx: Context) -> str:
    """Why the MPI backend cannot be tried, or nothing."""
    if not dist.is_mpi_available():
        return f"torch {torch.__version__} was built without MPI"
    if ctx.place.launcher not in _OF_MPI:
        return "the MPI backend needs mpirun, which did not start this run"
    return ""


def _by_mpi(ctx: Context) -> float:
    """MPI knows the ranks itself."""
    ctx.barrier()
    begin = time.perf_counter()
    ctx.step("init_process_group mpi")
    dist.init_process_group("mpi")
    return begin


def _tcp(ctx: Context) -> tuple[str, dict[str, str]]:
    # Rank 0 must know a free port before it listens; somebody else may take it in between, as in every real job.
    opening = ctx.barrier(str(free_port(ports=allowed_ports(ctx.options))) if ctx.group_rank == 0 else "")
    host = f"[{opening.host}]" if ":" in opening.host else opening.host
    return f"tcp://{host}:{opening.offer}", {}


def _env(ctx: Context) -> tuple[str, dict[str, str]]:
    """As the user's job will do it: through torchrun's agent where that serves the store, else on MASTER_PORT."""
    ctx.barrier()
    if not ctx.trial.params.get("agent_store"):
        return "env://", {}
    return "env://", {_AGENT_STORE: "True"}


def _file(ctx: Context, nonce: str) -> tuple[str, dict[str, str]]:
    """A fresh file: a stale one of an earlier job makes ranks connect to the dead."""
    folder = Path(ctx.options.shared_dir or ctx.scratch)
    if nonce and ctx.group_rank == 0:
        folder = next(folder.glob(f"ddpdiag-*-{nonce}"), folder)
    name = f"ddpdiag-rendezvous-{os.getpid()}-{ctx.trial.number}"
    opening = ctx.barrier(str(folder.absolute() / name) if ctx.group_rank == 0 else "")
    return f"file://{opening.offer}", {}


_PREPARE = {"tcp": _tcp, "env": _env}


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the duration of a call."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
