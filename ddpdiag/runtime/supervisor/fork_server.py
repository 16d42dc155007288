"""The fork server: imports torch once, and forks workers for one rank or for several ranks of its host.

A fork from a process that has torch gives a worker in some 25 ms; a new interpreter needs seconds. The server first
imports torch. It then answers the requests that arrived meanwhile, so that the first worker starts at once. Beside the
first trials it imports what DDP loads lazily, unless the run trains nothing. No code here may touch CUDA, because a
context does not survive a fork.

One supervisor starts the server; the supervisors of other ranks connect to its socket (sharing.py). It depends on none
of them alone: each holds the writing end of a pipe, and the kernel kills the server when the last of them has ended.
Each worker has such a pipe to its supervisor, and ends with the server as well. The server waits for no client, and
refuses one that differs from the first before it reads anything from it.
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

# DDP and torch.optim import these at first use (some 800 modules, 1-2 s). The server does it once, outside of the timed
# training.
LAZY_IMPORTS = ("torch._dynamo", "ddpdiag.workloads.training", "ddpdiag.workloads.proof", "ddpdiag.workloads.steps")
# Variable with the reason why workers are new processes and not forks (`fork_hazard`); LCH003 reports it.
NOT_FORKED = "DDPDIAG_NOT_FORKED"
# Clients to accept before the requests of connected clients are served again.
_ACCEPTED_AT_ONCE = 16


def import_torch() -> float:
    """Import torch, then all checks; return torch's seconds. They are set in the environment, too, for LCH003."""
    begin, used = time.monotonic(), core_seconds(os.getpid())
    # is_available() would create a CUDA context if an imported module called it; through NVML it does not.
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
    """The fork server's process. `life` is a pipe that its clients hold open. `listener`: None for a single client."""

    def __init__(self, life: int, first: socket.socket, listener: socket.socket | None) -> None:
        self._life = life
        self._first = first  # the supervisor that started this process, in the environment of its rank
        self._clients = [first]
        self._listener = listener
        self._environ = dict(os.environ)
        self._owners: dict[int, socket.socket] = {}  # the client of each worker, by pid
        self._import_seconds: float | None = None
        self._lazy_imports = list(LAZY_IMPORTS)

    def run(self) -> NoReturn:
        """Import torch, then serve until the last client has ended."""
        if self._listener is not None:
            # listen() again, in this process: the kernel shows clients the pid of the last process that called it, so
            # that they know the server during the import. Clients that connected before are accepted now.
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
        # A handler, so that a supervisor learns of a worker's end even during an import.
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: self._reap())
        while True:
            self._serve()

    def _serve(self) -> None:
        """Serve requests; if there is none, do one of the remaining lazy imports, or wait if all are done."""
        poller = select.poll()
        poller.register(self._life, 0)
        if self._listener is not None:
            poller.register(self._listener, select.POLLIN)
        for client in self._clients:
            poller.register(client, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(0 if self._lazy_imports else None)}
        if self._life in ready:
            os._exit(0)  # the last client has ended; most kernels have sent SIGKILL by now
        for client in [client for client in self._clients if client.fileno() in ready]:
            self._answer(client)
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept()
        if not ready and self._lazy_imports:
            _import_lazily(self._lazy_imports.pop(0))

    def _accept(self) -> None:
        """Accept some of the waiting clients, and refuse those whose process differs from this one."""
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
        """Serve one client; drop it if it has ended or sends an invalid request."""
        descriptors = array.array("i")
        try:
            data = _receive(client, descriptors)
            match ipc.decode_fork_server_request.decode(data) if data else None:
                case ipc.SkipLazyImports():
                    self._lazy_imports.clear()
                case ipc.Fork(rank) if len(descriptors) == ipc.FORK_DESCRIPTORS:
                    self._fork(client, rank, descriptors)
                case _:
                    self._drop(client)
        except (OSError, msgspec.DecodeError):  # the limit of processes is reached, or the data is no message
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
        # Blocked, so that the end of a worker is not sent before its start.
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
        *channels, life, log, _ = descriptors
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
                for descriptor in (*channels, life):
                    os.set_inheritable(descriptor, True)
                words = python_command(worker.__name__, str(parent), *map(str, channels))
                os.execve(words[0], words, {**os.environ, NOT_FORKED: hazard})
            leave_terminal()
            gc.enable()
            worker.serve(*channels)
        finally:
            # Never return into the server's loop: the log and the exit code say what ended this worker.
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
    """Send without waiting: a client that does not read, or has ended, must not delay the others."""
    with contextlib.suppress(OSError):
        client.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def _receive(client: socket.socket, descriptors: "array.array[int]") -> bytes:
    """A message of a client; the descriptors that were sent with it are added to `descriptors`."""
    room = socket.CMSG_SPACE(ipc.FORK_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, _, _ = client.recvmsg(MAX_MESSAGE_BYTES, room, socket.MSG_DONTWAIT)
    for _level, _kind, payload in ancillary:
        descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data


def _import_lazily(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - torch's code: if a trial needs the module, its outcome reports it
        traceback.print_exc()
    gc.freeze()


def _set_title(title: str) -> None:
    """Set the name in ps -o comm, top and the kernel's log of killed processes; it has 15 characters at most."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(title)


# Device files of NVIDIA's driver and of WSL2; the driver's own threads are cuda-EvtHandlr, cuda00001400006 and so on.
_GPU_DEVICE = re.compile(r"/dev/(nvidia|dxg)")


def fork_hazard(root: Path = Path("/proc/self")) -> str | None:
    """The sign that CUDA was started in the process at `root`, or None: CUDA does not survive a fork.

    Threads of other libraries (OpenBLAS starts some at its import) are no such sign.
    """
    for link in (root / "fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed by now
            if _GPU_DEVICE.match(target := os.readlink(link)):
                return f"{target} is open after the imports"
    for thread in (root / "task").iterdir():
        with contextlib.suppress(OSError):
            if (name := (thread / "comm").read_text().strip()).startswith("cuda"):
                return f"CUDA's thread {name} runs after the imports"
    torch = sys.modules.get("torch")
    return "CUDA is initialized after the imports" if torch is not None and torch.cuda.is_initialized() else None


def main(life: int, channel: int, listener: int | None = None) -> NoReturn:
    """Run the fork server. Descriptors: the clients' pipe, the channel to the supervisor that starts it, its socket."""
    die_with_writers(life)
    if listener is None:
        die_with_parent(os.getppid())  # for kernels that send no signal at the end of a pipe
    leave_terminal()
    dump_stacks_to(2)
    gc.disable()  # the collector would take a tenth of the import's time and find nothing
    others = None if listener is None else socket.socket(fileno=listener)
    if others is not None:
        others.setblocking(False)
    ForkServer(life, socket.socket(fileno=channel), others).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
