"""The fork server: imports torch once, then forks workers on request.

A fork from a process that has torch gives a worker in some 25 ms, where a new interpreter needs seconds. The order is:
import torch, serve what was asked for meanwhile (so the first worker starts at once), then import what DDP loads
lazily, beside the first trials, unless the run trains nothing. Nothing here may touch CUDA: a context does not survive
a fork.
"""

import array
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback

import msgspec

from ddpdiag.probes.host.kernel import core_seconds
from ddpdiag.runtime.supervisor.ipc import Exited, Forked, ForkServerMessage, Imported
from ddpdiag.runtime.supervisor.processes import DUMP_SIGNAL, die_with_parent, leave_terminal

# DDP and torch.optim import this at first use (some 800 modules, 1-2 s); paid here it is paid once, and off the clock
# of training.
LAZY_IMPORTS = ("torch._dynamo",)
DESCRIPTORS = 4  # the worker's channel, step page, stack file and the channel to its recorder


def main(arguments: list[str]) -> None:
    """Entry: PARENT_PID SOCKET."""
    parent, descriptor = (int(argument) for argument in arguments)
    die_with_parent(parent)
    leave_terminal()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    channel = socket.socket(fileno=descriptor)
    gc.disable()  # a tenth of the import's time goes into collecting what nobody drops
    seconds = import_torch()
    _send(channel, Imported(seconds))
    _serve(channel)


def import_torch() -> float:
    """Import torch and all checks; the seconds that it took, which LCH003 finds in the environment."""
    begin, used = time.monotonic(), core_seconds(os.getpid())
    # is_available() would create a CUDA context here if an imported module asked; through NVML it does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("torch")
    importlib.import_module("ddpdiag.checks")
    seconds = time.monotonic() - begin
    os.environ["DDPDIAG_IMPORT_SECONDS"] = f"{seconds:.3f}"
    now = core_seconds(os.getpid())
    if used is not None and now is not None:
        os.environ["DDPDIAG_IMPORT_CORE_SECONDS"] = f"{now - used:.3f}"
    return seconds


def _send(channel: socket.socket, message: ForkServerMessage) -> None:
    channel.send(msgspec.json.encode(message))


def _serve(channel: socket.socket) -> None:
    """Fork on request, report the dead, import in idle moments; ends when the supervisor closes the socket."""
    # In the handler, so that the supervisor learns of a death in the middle of an import, too.
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: _reap(channel))
    waiting = list(LAZY_IMPORTS)
    while True:
        ready, _, _ = select.select([channel], [], [], 0 if waiting else None)
        if channel in ready and not _fork(channel):
            waiting.clear()
        if not ready and waiting:
            _import_lazily(waiting.pop(0))


def _import_lazily(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - an edge: a build of torch may lack it, and then says so where it is needed
        traceback.print_exc()
    gc.freeze()  # forks then share these pages instead of copying them


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(channel, Exited(pid, os.waitstatus_to_exitcode(status)))


def _fork(channel: socket.socket) -> bool:
    """Do what the supervisor asks; False if that was SkipLazyImports, which has no descriptors."""
    data, ancillary, _, _ = channel.recvmsg(1024, socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize))
    if not data:
        os._exit(0)
    descriptors = array.array("i")
    for _level, _kind, payload in ancillary:
        descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if not descriptors:
        return False
    parent = os.getpid()
    # Its end must not be told before its start.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        _become_worker(parent, channel, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    _send(channel, Forked(pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return True


def _become_worker(parent: int, server: socket.socket, descriptors: "array.array[int]") -> None:
    from ddpdiag.runtime.supervisor.worker import serve

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    die_with_parent(parent)
    leave_terminal()
    server.close()
    gc.enable()
    try:
        serve(*descriptors)
    finally:
        # Never back into the server's loop: whatever ended this worker is told in its log and by its exit code.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


if __name__ == "__main__":
    main(sys.argv[1:])
