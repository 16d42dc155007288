"""What the fork server imports beside the first trials, and whom it serves."""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping

import pytest

from ddpdiag.runtime.record import make_run_folder
from ddpdiag.runtime.supervisor import ipc, workers

SERVE = """
import sys
from ddpdiag.runtime.supervisor import fork_server
fork_server.LAZY_IMPORTS = ("lazy_probe",)
fork_server.import_torch = lambda: 0.1
fork_server.main(*map(int, sys.argv[1:]))
"""


class Server:
    """A fork server without torch, and the channel of the supervisor that started it."""

    def __init__(self, environ: Mapping[str, str], early: bytes = b"") -> None:
        self.address = f"\0ddpdiag-test-{uuid.uuid4().hex}"  # so that another user can try it
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.address)
        listener.listen()
        self.channels: list[socket.socket] = []
        self.first, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if early:
            self.first.send(early)
        life_end, self.life = os.pipe()
        passed = (life_end, theirs.fileno(), listener.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *map(str, passed)], pass_fds=passed, env=environ, stderr=subprocess.DEVNULL
        )
        for end in (theirs, listener):
            end.close()
        os.close(life_end)

    def connected(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(20)
        self.channels.append(channel)
        channel.connect(self.address)
        return channel

    def end(self) -> int:
        os.close(self.life)
        self.close()
        return self.process.wait(20)

    def close(self) -> None:
        for channel in (self.first, *self.channels):
            channel.close()


@pytest.fixture
def environ(tmp_path) -> Mapping[str, str]:
    """The server's, in which a module says that it was imported."""
    (tmp_path / "lazy_probe.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    return {"PYTHONPATH": f"{tmp_path}:{':'.join(path for path in sys.path if path)}", "RANK": "0", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def server(environ) -> Iterator[Server]:
    started = Server(environ, b'{"type":"SkipLazyImports"}')
    yield started
    assert started.end() in (0, -9), "it ends with its last client"


def asked(channel: socket.socket, environ: Mapping[str, str]) -> list[type]:
    """The kinds of its answers to the request for a worker, and to the connection."""
    descriptors = [ipc.anonymous_file("test") for _ in range(ipc.FORK_DESCRIPTORS - 1)]
    descriptors.append(ipc.environment_file(environ))
    socket.send_fds(channel, [b'{"type":"Fork","rank":1}'], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    answers: list[type] = []
    while not {ipc.Forked, ipc.ForkRefused}.intersection(answers):
        answers.append(type(ipc.decode_fork_server_message.decode(channel.recv(1000))))
    return answers


def test_what_ddp_loads_is_imported(environ, tmp_path):
    server, end = Server(environ), time.monotonic() + 20
    while not (tmp_path / "imported").exists() and time.monotonic() < end:
        time.sleep(0.01)
    server.end()
    assert (tmp_path / "imported").exists()


def test_what_ddp_loads_is_not_imported_where_nothing_will_be_trained(server, tmp_path):
    asked(server.connected(), {})  # read after the request of the first client
    assert not (tmp_path / "imported").exists()


def test_a_worker_is_forked_for_a_rank_that_differs_in_its_own_variables(server, environ):
    own = {"RANK": "1", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1"}
    assert asked(server.connected(), {**environ, **own}) == [ipc.Accepted, ipc.Imported, ipc.Forked]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LD_PRELOAD", "HOME", "PYTORCH_CUDA_ALLOC_CONF", "WORLD_SIZE"])
def test_a_rank_that_differs_in_any_other_variable_is_refused(server, environ, name):
    assert asked(server.connected(), {**environ, name: "2"}) == [ipc.Accepted, ipc.Imported, ipc.ForkRefused]


def test_a_client_that_sends_nonsense_is_dropped_alone(server, environ):
    wrong, right = server.connected(), server.connected()
    wrong.send(b"{")
    assert asked(right, environ)[-1] is ipc.Forked
    while wrong.recv(1000):
        pass


# Another user at the socket with the name in hexadecimal.
STRANGER = """
import os, socket, sys
os.setuid(12_002)
own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    own.connect(bytes.fromhex(sys.argv[1]))
    print(own.recv(1000))
except OSError as error:
    print(type(error).__name__)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def stranger(address: str) -> str:
    words = [sys.executable, "-c", STRANGER, address.encode().hex()]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=20).stdout


@needs_root
def test_another_user_is_not_served(server, environ):
    assert "ForkRefused" in stranger(server.address)
    assert asked(server.connected(), environ)[-1] is ipc.Forked


@needs_root
def test_another_user_cannot_connect_in_the_folder_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    address = make_run_folder("test") / "imports"
    _, listener = workers.connect_or_listen(address)
    assert stranger(str(address)) == "PermissionError\n"
    listener.close()


def test_an_environment_that_no_process_can_have_is_not_read(server, environ):
    """A sparse file of any size costs its sender nothing."""
    channel, descriptor = server.connected(), ipc.anonymous_file("test")
    os.truncate(descriptor, 10**15)
    socket.send_fds(channel, [b'{"type":"Fork","rank":1}'], [descriptor] * ipc.FORK_DESCRIPTORS)
    while channel.recv(1000):
        pass
    assert asked(server.connected(), environ)[-1] is ipc.Forked


def test_the_first_at_a_name_opens_it_and_the_next_one_connects(tmp_path):
    """Also where the path is longer than that of a socket may be, and where a server was killed before."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    nothing, killed = workers.connect_or_listen(folder / "imports")
    assert (nothing, killed is None) == (None, False)
    killed.close()
    nothing, listener = workers.connect_or_listen(folder / "imports")
    channel, none_either = workers.connect_or_listen(folder / "imports")
    assert (nothing, none_either) == (None, None)
    assert listener is not None
    assert channel is not None
    listener.close()
    channel.close()


def test_the_server_ends_with_the_last_that_holds_its_pipe(environ):
    server = Server(environ)
    channel = server.connected()
    message = ipc.decode_fork_server_message.decode(channel.recv(1000))
    assert isinstance(message, ipc.Accepted)
    held = os.open(f"/proc/{message.pid}/fd/{message.life_pipe}", os.O_WRONLY)
    os.close(server.life)
    server.first.close()
    assert asked(channel, environ)[-1] is ipc.Forked, "another client keeps it alive"
    os.close(held)
    assert server.process.wait(20) in (0, -9)
    server.close()
