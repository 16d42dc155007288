"""The process of the fork server, which imports torch once, and forks workers for one or several ranks of its host.

A fork of a process that has imported torch takes some 25 ms, and a new interpreter takes seconds. The server first
imports torch. Then it answers the requests that arrived meanwhile, so that the first worker starts at once. While the
first trials run, it imports the modules that DDP loads lazily, unless the run trains no model. No code in this module
may use CUDA, because a CUDA context does not survive a fork.

One supervisor starts the server, and the supervisors of other ranks connect to its socket (sharing.py). These are its
clients. Each client holds the writing end of a pipe, and the kernel kills the server when the last client has ended.
Each worker has such a pipe to its supervisor, and also ends with the server. The server never blocks on a client. It
refuses a client whose process differs from the first client's before it reads any request of that client.
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
from ddpdiag.probes.host.kernel import runnable_seconds
from ddpdiag.probes.host.programs import python_command
from ddpdiag.runtime.control.messages import MAX_MESSAGE_BYTES
from ddpdiag.runtime.supervisor import ipc, sharing, worker
from ddpdiag.runtime.supervisor.processes import detach_from_terminal, die_with_parent, die_with_writers, dump_stacks_to

# DDP and torch.optim import these at their first use (some 800 modules, 1-2 s). The server imports them once, before
# the timed training.
LAZY_IMPORTS = ("torch._dynamo", "ddpdiag.workloads.training", "ddpdiag.workloads.proof", "ddpdiag.workloads.steps")
# Variable with the reason (`fork_hazard`) why workers are new processes instead of forks. LCH003 reports it.
NOT_FORKED = "DDPDIAG_NOT_FORKED"
# The most clients that are accepted before the requests of connected clients are served again.
_ACCEPTED_AT_ONCE = 16


def import_torch() -> float:
    """Import torch, then all checks. Returns the seconds that torch took, and sets variables for LCH003 (versions)."""
    begin, begin_cpu_seconds = time.monotonic(), runnable_seconds(os.getpid())
    # is_available() would create a CUDA context if an imported module called it; through NVML it does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("torch")
    seconds = time.monotonic() - begin
    os.environ["DDPDIAG_IMPORT_PID"] = str(os.getpid())
    os.environ["DDPDIAG_IMPORT_SECONDS"] = f"{seconds:.3f}"
    end_cpu_seconds = runnable_seconds(os.getpid())
    if begin_cpu_seconds is not None and end_cpu_seconds is not None:
        os.environ["DDPDIAG_IMPORT_CORE_SECONDS"] = f"{end_cpu_seconds - begin_cpu_seconds:.3f}"
    all_checks()
    return seconds


class ForkServer:
    """The fork server in its own process. Its clients hold `life_pipe` open. `listener` is None for a single client."""

    def __init__(self, life_pipe: int, first_client: socket.socket, listener: socket.socket | None) -> None:
        self._life_pipe = life_pipe
        self._first_client = first_client  # the supervisor that started this process, in the environment of its rank
        self._clients = [first_client]
        self._listener = listener
        self._first_environment = dict(os.environ)
        self._client_of_worker: dict[int, socket.socket] = {}  # the client of each worker, by pid
        self._import_seconds: float | None = None
        self._lazy_imports = list(LAZY_IMPORTS)

    def run(self) -> NoReturn:
        """Import torch, then serve until the last client has ended."""
        if self._listener is not None:
            # The supervisor called listen() before. A second call, in this process, makes the kernel show the server's
            # pid to clients that connect during the import. Clients that connected before are accepted now.
            self._listener.listen(ipc.MAX_CLIENTS)
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
        gc.freeze()  # so that forks share the memory of these objects instead of copying it
        self._send_all(ipc.Imported(self._import_seconds))
        # A signal handler, so that the end of a worker is reported even during an import.
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: self._reap())
        while True:
            self._serve()

    def _serve(self) -> None:
        """Serve the waiting requests. If there is none, do one of the remaining lazy imports, or else wait."""
        poller = select.poll()
        poller.register(self._life_pipe, 0)
        if self._listener is not None:
            poller.register(self._listener, select.POLLIN)
        for client in self._clients:
            poller.register(client, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(0 if self._lazy_imports else None)}
        if self._life_pipe in ready:
            os._exit(0)  # the last client has ended; most kernels have sent SIGKILL by now
        for client in [client for client in self._clients if client.fileno() in ready]:
            self._handle_request(client)
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept()
        if not ready and self._lazy_imports:
            _import_lazily(self._lazy_imports.pop(0))

    def _accept(self) -> None:
        """Accept some of the waiting clients. Refuse a client that differs from this process or is one too many."""
        if self._listener is None:
            return
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if len(self._clients) >= ipc.MAX_CLIENTS or not sharing.has_equal_traits(client):
                _send(client, ipc.ForkRefused("its process differs"))
                client.close()
                continue
            self._clients.append(client)
            _send(client, ipc.Accepted(os.getpid(), self._life_pipe))
            if self._import_seconds is not None:
                _send(client, ipc.Imported(self._import_seconds))

    def _handle_request(self, client: socket.socket) -> None:
        """Serve one request of a client. Drop the client if it has ended or sent an invalid request."""
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
        """Fork a worker, and report its pid, or refuse if the client's environment differs from the first client's."""
        environ = ipc.read_environment(descriptors[-1])
        name = sharing.variable_that_differs(self._first_environment, environ)
        if name is not None and client is not self._first_client:
            _send(client, ipc.ForkRefused(name))
            return
        parent, hazard = os.getpid(), fork_hazard()
        # Blocked, so that the end of a worker is not reported before its start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(parent, rank, environ, descriptors, hazard)
            self._client_of_worker[pid] = client
            _send(client, ipc.Forked(pid))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _become_worker(
        self, parent: int, rank: int, environ: Mapping[str, str], descriptors: "array.array[int]", hazard: str | None
    ) -> NoReturn:
        *channels, life_pipe, log, _ = descriptors
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            die_with_parent(parent)
            die_with_writers(life_pipe)
            for client in self._clients:
                client.close()
            if self._listener is not None:
                self._listener.close()
            os.close(self._life_pipe)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for name in self._first_environment.keys() | environ.keys():
                if self._first_environment.get(name) != environ.get(name):
                    worker.apply_variables({name: environ.get(name)})
            with contextlib.suppress(OSError):  # the name in `ps -o comm`, of 15 characters at most
                Path("/proc/self/comm").write_text(f"ddpdiag-r{rank}")
            if hazard is not None:
                for descriptor in (*channels, life_pipe):
                    os.set_inheritable(descriptor, True)
                command = python_command(worker.__name__, str(parent), *map(str, channels))
                os.execve(command[0], command, {**os.environ, NOT_FORKED: hazard})
            detach_from_terminal()
            gc.enable()
            worker.serve_trials(*channels)
        finally:
            # Never return into the server's loop. The log and the exit code say what ended this worker.
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
            if (client := self._client_of_worker.pop(pid, None)) is not None:
                _send(client, ipc.Exited(pid, os.waitstatus_to_exitcode(status)))

    def _send_all(self, message: ipc.ForkServerMessage) -> None:
        for client in self._clients:
            _send(client, message)


def _send(client: socket.socket, message: ipc.ForkServerMessage) -> None:
    """Send without waiting, because a client that does not read, or has ended, must not delay other clients."""
    with contextlib.suppress(OSError):
        client.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def _receive(client: socket.socket, descriptors: "array.array[int]") -> bytes:
    """Receive a message of a client, and append the descriptors that were sent with it to `descriptors`."""
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


# Device files of NVIDIA's driver and of WSL2. The driver's threads have names such as cuda-EvtHandlr, cuda00001400006.
_GPU_DEVICE = re.compile(r"/dev/(nvidia|dxg)")


def fork_hazard(root: Path = Path("/proc/self")) -> str | None:
    """The sign that CUDA was started in the process at `root`, so that it must not be forked, or None.

    Threads of other libraries (OpenBLAS starts some at its import) do no harm.
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


def main(life_pipe: int, channel: int, listener: int | None = None) -> NoReturn:
    """Run the fork server. Descriptors: the clients' pipe, the first client's channel, the socket for other clients."""
    die_with_writers(life_pipe)
    if listener is None:
        die_with_parent(os.getppid())  # for kernels that send no signal at the end of a pipe
    detach_from_terminal()
    dump_stacks_to(2)
    gc.disable()  # the collector would take a tenth of the import's time and find nothing
    listening_socket = None if listener is None else socket.socket(fileno=listener)
    if listening_socket is not None:
        listening_socket.setblocking(False)
    ForkServer(life_pipe, socket.socket(fileno=channel), listening_socket).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
