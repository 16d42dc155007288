"""The three ways in which a job's processes find each other: tcp://, env:// and file://."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ddpdiag.check import Context
from ddpdiag.probes.sockets import allowed_ports, free_port
from ddpdiag.workloads.devices import choose_device
from ddpdiag.workloads.group import group_timeout

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def meet(ctx: Context, method: str, backend: str, nonce: str) -> float:
    """Open the default group as `method` says, pass a barrier, close it; seconds until the group stood.

    `method` is tcp, env or file; a folder in the shared directory whose name ends with `nonce` is the run's own. The
    gate stands before the rendezvous, so the seconds are the rendezvous' own.
    """
    choose_device(backend, ctx.place.local_rank)
    url, environment = _file(ctx, nonce) if method == "file" else _PREPARE[method](ctx)
    begin = time.perf_counter()
    ctx.step(f"init_process_group {method}://")
    with _variables(environment):
        # What init_process_group(init_method=url) does, with a prefix for each trial: torchrun's agent keeps the keys
        # of all of them in one store (torch 2.13 adds no prefix), and a second trial would read the first one's.
        store, rank, size = next(rendezvous(url, ctx.group_rank, len(ctx.group), timeout=group_timeout(ctx)))
        own = dist.PrefixStore(f"ddpdiag-{ctx.trial.number}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=group_timeout(ctx))
    seconds = time.perf_counter() - begin
    ctx.timed("group", seconds)
    work = dist.barrier(async_op=True)
    ctx.step("barrier: wait")
    if work is not None:
        work.wait()
    ctx.step("destroy_process_group")
    dist.destroy_process_group()
    return seconds


def _tcp(ctx: Context) -> tuple[str, dict[str, str]]:
    # Rank 0 must know a free port before it listens; somebody else may take it in between, as in every real job.
    opening = ctx.gate(str(free_port(ports=allowed_ports(ctx.options))) if ctx.group_rank == 0 else "")
    host = f"[{opening.host}]" if ":" in opening.host else opening.host
    return f"tcp://{host}:{opening.offer}", {}


def _env(ctx: Context) -> tuple[str, dict[str, str]]:
    """As the user's job will do it: through torchrun's agent where that serves the store, else on MASTER_PORT."""
    ctx.gate()
    if not ctx.trial.params.get("agent_store"):
        return "env://", {}
    return "env://", {_AGENT_STORE: "True"}


def _file(ctx: Context, nonce: str) -> tuple[str, dict[str, str]]:
    """A fresh file: a stale one of an earlier job makes ranks connect to the dead."""
    folder = Path(ctx.options.shared_dir or ctx.scratch)
    if nonce and ctx.group_rank == 0:
        folder = next(folder.glob(f"ddpdiag-*-{nonce}"), folder)
    name = f"ddpdiag-rendezvous-{os.getpid()}-{ctx.trial.number}"
    opening = ctx.gate(str(folder.absolute() / name) if ctx.group_rank == 0 else "")
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
