"""The fork server: imports torch once, and forks workers for one rank or for several ranks of its host.

A fork from a process that has torch gives a worker in some 25 ms, where a new interpreter needs seconds. The order is
this: import torch, serve what was asked for meanwhile (so the first worker starts at once), then import what DDP
loads lazily, beside the first trials, unless the run trains nothing. Nothing here may touch CUDA: a context does not
survive a fork.

One supervisor starts it; those of other ranks connect to its socket (sharing.py). It belongs to none of them: each
holds the writing end of a pipe, and the kernel kills the server when the last of them has ended. Each worker has such a
pipe to its own supervisor, and ends with the server as well. No client is waited for, and one that is unlike the first
is refused before anything of it is read.
"""

import array
import contextlib
import gc
import importlib
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from ddpdiag.checks.registry import all_checks
from ddpdiag.probes.host.kernel import core_seconds
from ddpdiag.probes.host.programs import python_command
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.supervisor import ipc, sharing, worker
from ddpdiag.runtime.supervisor.processes import die_with_parent, die_with_writers, dump_stacks_to, leave_terminal

# DDP and torch.optim import this at first use (some 800 modules, 1-2 s); paid here it is paid once, and off the clock
# of training.
LAZY_IMPORTS = ("torch._dynamo", "ddpdiag.workloads.training", "ddpdiag.workloads.proof", "ddpdiag.workloads.steps")
# Why workers are new processes and no forks (`fork_hazard`), for LCH003.
NOT_FORKED = "DDPDIAG_NOT_FORKED"
# New clients of one turn: those that are connected already come first.
_ACCEPTED_AT_ONCE = 16


def import_torch() -> float:
    """Import torch, then all checks; the seconds that torch took, which LCH003 finds in the environment."""
    begin, used = time.monotonic(), core_seconds(os.getpid())
    # is_available() would create a CUDA context here if an imported module asked; through NVML it does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("torch")
    seconds = time.monotonic() - begin
    os.environ["DDPDIAG_IMPORT_PID"] = str(os.getpid())
    os.environ["DDPDIAG_IMPORT_SECONDS"] = f"{seconds:.3f}"
    now = core_seconds(os.getpid())
    if used is not None and now is not None:
        os.environ["DDPDIAG_IMPORT_CORE_SECONDS"] = f"{now - used:.3f}"
    all_checks()
    return seconds


class ForkServer:
    """This process, as its clients use it. `life` ends with the last of them; `listener` is None for a single one."""

    def __init__(self, life: int, first: socket.socket, listener: socket.socket | None) -> None:
        self._life = life
        self._first = first  # of the supervisor that started this process with what its rank has
        self._clients = [first]
        self._listener = listener
        self._environ = dict(os.environ)
        self._owners: dict[int, socket.socket] = {}  # by the worker's pid
        self._import_seconds: float | None = None
        self._waiting = list(LAZY_IMPORTS)

    def run(self) -> NoReturn:
        """Import torch, then serve until the last client has left."""
        if self._listener is not None:
            # Once more, in this process: the kernel tells clients who called it last, so they know the server's pid
            # while the import holds it up. Those that connected before are answered now.
            self._listener.listen(ipc.MOST_CLIENTS)
            self._accept()
        try:
            self._import_seconds = import_torch()
        finally:
            if self._import_seconds is None:
                traceback.print_exc()
                sys.stderr.flush()
                self._accept()
                self._send_all(ipc.Exited(os.getpid(), 1))
                os._exit(1)
        gc.freeze()  # forks then share these pages instead of copying them
        self._send_all(ipc.Imported(self._import_seconds))
        # In the handler, so that a supervisor learns of a death in the middle of an import, too.
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: self._reap())
        while True:
            self._serve()

    def _serve(self) -> None:
        """Serve requests; without one, import what is still to be imported, or wait."""
        poller = select.poll()
        poller.register(self._life, 0)
        if self._listener is not None:
            poller.register(self._listener, select.POLLIN)
        for client in self._clients:
            poller.register(client, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(0 if self._waiting else None)}
        if self._life in ready:
            os._exit(0)  # the kernel has sent SIGKILL where it can
        for client in [client for client in self._clients if client.fileno() in ready]:
            self._answer(client)
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept()
        if not ready and self._waiting:
            _import_lazily(self._waiting.pop(0))

    def _accept(self) -> None:
        """Accept some of the clients that wait, if they are like this process."""
        if self._listener is None:
            return
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if len(self._clients) >= ipc.MOST_CLIENTS or not sharing.is_alike(client):
                _send(client, ipc.Unlike("its process differs"))
                client.close()
                continue
            self._clients.append(client)
            _send(client, ipc.Accepted(os.getpid(), self._life))
            if self._import_seconds is not None:
                _send(client, ipc.Imported(self._import_seconds))

    def _answer(self, client: socket.socket) -> None:
        """Serve one client; a client that has ended, or sends an invalid request, is dropped."""
        descriptors = array.array("i")
        try:
            data = _receive(client, descriptors)
            match ipc.decode_fork_server_request.decode(data) if data else None:
                case ipc.SkipLazyImports():
                    self._waiting.clear()
                case ipc.Fork(rank) if len(descriptors) == ipc.FORK_DESCRIPTORS:
                    self._fork(client, rank, descriptors)
                case _:
                    self._drop(client)
        except (OSError, msgspec.DecodeError):  # no more processes may be started, or it is no message
            traceback.print_exc()
            self._drop(client)
        for descriptor in descriptors:
            os.close(descriptor)

    def _drop(self, client: socket.socket) -> None:
        self._clients.remove(client)
        client.close()

    def _fork(self, client: socket.socket, rank: int, descriptors: "array.array[int]") -> None:
        environ = ipc.read_environment(descriptors[-1])
        if client is not self._first and (name := sharing.variable_that_differs(self._environ, environ)):
            _send(client, ipc.Unlike(name))
            return
        parent, hazard = os.getpid(), fork_hazard()
        # The end of a worker must not be sent before its start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(parent, rank, environ, descriptors, hazard)
            self._owners[pid] = client
            _send(client, ipc.Forked(pid))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _become_worker(
        self, parent: int, rank: int, environ: Mapping[str, str], descriptors: "array.array[int]", hazard: str | None
    ) -> NoReturn:
        *own, life, log, _ = descriptors
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            die_with_parent(parent)
            die_with_writers(life)
            for client in self._clients:
                client.close()
            if self._listener is not None:
                self._listener.close()
            os.close(self._life)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for name in self._environ.keys() | environ.keys():
                if self._environ.get(name) != environ.get(name):
                    worker.apply({name: environ.get(name)})
            _set_title(f"ddpdiag-r{rank}")
            if hazard is not None:
                for descriptor in (*own, life):
                    os.set_inheritable(descriptor, True)
                words = python_command(worker.__name__, str(parent), *map(str, own))
                os.execve(words[0], words, {**os.environ, NOT_FORKED: hazard})
            leave_terminal()
            gc.enable()
            worker.serve(*own)
        finally:
            # Never back into the server's loop: whatever ended this worker is told in its log and by its exit code.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (owner := self._owners.pop(pid, None)) is not None:
                _send(owner, ipc.Exited(pid, os.waitstatus_to_exitcode(status)))

    def _send_all(self, message: ipc.ForkServerMessage) -> None:
        for client in self._clients:
            _send(client, message)


def _send(client: socket.socket, message: ipc.ForkServerMessage) -> None:
    """Without waiting: a client that reads nothing, or has left, must hold up no other."""
    with contextlib.suppress(OSError):
        client.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def _receive(client: socket.socket, descriptors: "array.array[int]") -> bytes:
    """A message; what was sent beside it is added to `descriptors`."""
    room = socket.CMSG_SPACE(ipc.FORK_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, _, _ = client.recvmsg(MAX_MESSAGE_BYTES, room, socket.MSG_DONTWAIT)
    for _level, _kind, payload in ancillary:
        descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data


def _import_lazily(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - torch's own code: where it is needed (if ever) the trial says what is wrong
        traceback.print_exc()
    gc.freeze()


def _set_title(title: str) -> None:
    """The name that ps -o comm, top and the kernel's log of killed processes show; 15 characters at most."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(title)


# Device files of NVIDIA's driver and of WSL2; the driver's own threads are cuda-EvtHandlr, cuda00001400006 and so on.
_GPU_DEVICE = re.compile(r"/dev/(nvidia|dxg)")


def fork_hazard(root: Path = Path("/proc/self")) -> str | None:
    """Why a fork of this process could not use CUDA, or None: CUDA was started here, and does not survive a fork.

    The process is at `root`. Threads of other libraries (OpenBLAS starts some at its import) are no hazard.
    """
    for link in (root / "fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            if _GPU_DEVICE.match(target := os.readlink(link)):
                return f"{target} is open after the imports"
    for thread in (root / "task").iterdir():
        with contextlib.suppress(OSError):
            if (name := (thread / "comm").read_text().strip()).startswith("cuda"):
                return f"CUDA's thread {name} runs after the imports"
    torch = sys.modules.get("torch")
    return "CUDA is initialized after the imports" if torch is not None and torch.cuda.is_initialized() else None


def main(life: int, channel: int, listener: int | None = None) -> NoReturn:
    """Entry: descriptors of the pipe, of the channel to the supervisor that starts this, and of the socket."""
    die_with_writers(life)
    if listener is None:
        die_with_parent(os.getppid())  # also where a kernel knows no signal for the end of a pipe
    leave_terminal()
    dump_stacks_to(2)
    gc.disable()  # a tenth of the import's time goes into collecting what is never dropped
    others = None if listener is None else socket.socket(fileno=listener)
    if others is not None:
        others.setblocking(False)
    ForkServer(life, socket.socket(fileno=channel), others).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
