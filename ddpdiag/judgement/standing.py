"""What one rank does, from its stack and its process: waits in a collective, for its data, or is elsewhere.

Of a CPU job a rank that waits sleeps. Of a GPU job any Python line may be one that waits: `loss.item()` waits for a
kernel of NCCL, at full use of core and GPU. So there only a rank that holds the GIL is known not to wait: what waits
for CUDA in torch gives it away.
"""

import os
from enum import Enum

from ddpdiag.model import ProcessState
from ddpdiag.model.watch import RankSeen

# Files of torch in whose innermost Python frame a rank waits for others (torch 2.6-2.13): c10d's calls, among them the
# barrier and the rendezvous of a new group; functional collectives; what DDP does over all ranks at its construction.
_COLLECTIVE_FILES = frozenset({"distributed_c10d.py", "_functional_collectives.py", "rendezvous.py"})
_COLLECTIVE_FRAMES = frozenset(
    {
        "_verify_param_shape_across_processes (utils.py",
        "_sync_module_states (utils.py",
        "_broadcast_coalesced (utils.py",
    }
)
_BACKWARD = "_engine_run_backward (graph.py"
_IMPORT = "importlib._bootstrap"
_LAUNCHER_FILES = frozenset({"dynamic_rendezvous.py", "static_tcp_rendezvous.py", "c10d_rendezvous_backend.py"})
_LOADER_FILE = "dataloader.py"
# The loader's own frames stand outside of those of the queue that it waits for.
_LOADER_DEPTH = 12
# Who waits asleep uses nothing; a watchdog thread or two take some per cent.
IDLE_CORES = 0.2
BUSY_CORES = 0.6
# An import on a busy machine or file system still uses this much.
_AT_WORK_CORES = 0.02


class Stand(Enum):
    """What a rank does."""

    GONE = "gone"
    STOPPED = "stopped"
    STUCK = "stuck"
    WAITING = "waiting"  # in a collective, for others
    LOADING = "loading"  # for its own data
    ELSEWHERE = "elsewhere"  # it runs something else, and waits for no other rank
    OPEN = "open"  # on a GPU: it may wait for a kernel, or not
    UNSEEN = "unseen"  # there is no stack


def stand(seen: RankSeen) -> Stand:
    """What a rank does, as far as it can be known from itself alone."""
    process = seen.process
    state = process.state if process is not None else None
    if process is None or state in ("Z", "X"):
        return Stand.GONE
    if state in ("T", "t"):
        return Stand.STOPPED
    if state == "D":
        return Stand.STUCK
    if not process.stack:
        return Stand.UNSEEN
    return _in_python(seen, process)


def _in_python(seen: RankSeen, process: ProcessState) -> Stand:
    if waits(process) and not (seen.holds_gil and is_busy(seen)):
        return Stand.WAITING
    if any(file_of(frame) == _LOADER_FILE for frame in process.stack[:_LOADER_DEPTH]):
        return Stand.LOADING
    if place_of(process) == _BACKWARD and is_idle(seen) and not seen.holds_gpu:
        return Stand.WAITING
    return Stand.ELSEWHERE if seen.holds_gil or not seen.holds_gpu else Stand.OPEN


def waits(process: ProcessState) -> bool:
    """Is its innermost frame a collective?"""
    inner = process.stack[0] if process.stack else ""
    return file_of(inner) in _COLLECTIVE_FILES or place_of(process) in _COLLECTIVE_FRAMES


def is_launching(seen: RankSeen) -> bool:
    """Is it torchrun, waiting for the other hosts?"""
    stack = seen.process.stack if seen.process is not None else ()
    return any(file_of(frame) in _LAUNCHER_FILES for frame in stack)


def is_starting(seen: RankSeen) -> bool:
    """Is it importing modules, and at work? `import torch` alone takes seconds, or minutes on a busy file system."""
    process = seen.process
    if process is None or not any(_IMPORT in frame for frame in process.stack):
        return False
    return process.state == "R" or (seen.core_share or 0.0) >= _AT_WORK_CORES


def place_of(process: ProcessState) -> str:
    """The innermost frame without its line: waiting ranks differ in lines of a retry loop."""
    return process.stack[0].rpartition(":")[0] if process.stack else ""


def call_of(process: ProcessState) -> str:
    """The function of the innermost frame."""
    return process.stack[0].partition(" (")[0] if process.stack else ""


def file_of(frame: str) -> str:
    """The file in "function (file:line)"."""
    return os.path.basename(frame.rpartition(" (")[2].rpartition(":")[0])


def is_busy(seen: RankSeen) -> bool:
    """Does it use a core, as far as is known?"""
    return seen.core_share is not None and seen.core_share >= BUSY_CORES


def is_idle(seen: RankSeen) -> bool:
    """Does it use next to nothing, as far as is known?"""
    return seen.core_share is not None and seen.core_share <= IDLE_CORES
