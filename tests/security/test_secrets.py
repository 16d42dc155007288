"""Who shares a run's secret talks; nobody else does, and each side says why."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
from seen import arrival_of

from ddpdiag.errors import RunLost, UsageError
from ddpdiag.probes.host.kernel import open_files, tcp_sockets
from ddpdiag.probes.net.tcp_connect import free_port
from ddpdiag.runtime.control import key_file
from ddpdiag.runtime.control import wire as wire_module
from ddpdiag.runtime.control.client import RelayedClient
from ddpdiag.runtime.control.join import Endpoint, Rank0Endpoint, authentication_mechanism, join
from ddpdiag.runtime.control.messages import Hello, HelloAck
from ddpdiag.runtime.control.relay import ROUTE_REQUEST
from ddpdiag.runtime.control.secret import Origin, RunSecret
from ddpdiag.runtime.control.server import ControlServer
from ddpdiag.runtime.control.wire import Wire, new_router, new_socket

OURS, OTHERS, NONE = Wire("run", b"ours"), Wire("run", b"another"), Wire("run")


def joined(server_wire: Wire, client_wire: Wire) -> str:
    """What a rank is told that says hello to rank 0; empty if they talk."""
    server = ControlServer([free_port("127.0.0.1")], server_wire, arrival_of(0, 2), local_only=True)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            for identity, message in server.receive(0.02):
                assert isinstance(message, Hello)
                server.send(identity, HelloAck())

    thread = threading.Thread(target=serve)
    thread.start()
    endpoint = Endpoint("127.0.0.1", (server.port,), 0.4, min_hello_seconds=0.3)
    try:
        join(endpoint, lambda: Rank0Endpoint(client_wire), arrival_of(1, 2), lambda: None).close()
        return ""
    except RunLost as lost:
        return str(lost).partition(": ")[2].replace(str(server.port), "PORT")
    finally:
        over.set()
        thread.join()
        server.close()


@pytest.mark.parametrize("wire", [OURS, NONE], ids=["secret", "none"])
def test_who_shares_the_secret_talks(wire: Wire) -> None:
    assert joined(wire, wire) == ""


@pytest.mark.parametrize(
    ("rank_0", "rank"),
    [(OTHERS, OURS), (NONE, OURS), (OURS, NONE), (Wire("another run", b"ours"), OURS)],
    ids=["another secret", "rank 0 has none", "the rank has none", "another run"],
)
def test_nobody_else_does_and_is_told_why(golden, rank_0: Wire, rank: Wire) -> None:
    golden(joined(rank_0, rank))


def listeners(process: int) -> set[str]:
    """The addresses on which a process listens."""
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in open_files(Path(f"/proc/{process}"))}
    return {own.address for own in tcp_sockets() if own.listens and own.inode in inodes}


def test_a_run_over_loopback_listens_nowhere_else(tmp_path: Path) -> None:
    port = str(free_port("127.0.0.1"))
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [sys.executable, "-m", "ddpdiag", "check", "--select", "LCH001", "--join-timeout", "20"]
    with subprocess.Popen(
        words, env={**os.environ, **place, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as rank_0:
        try:
            end = time.monotonic() + 15
            while not (found := listeners(rank_0.pid)) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.2)  # a second port would be opened behind the first
            found |= listeners(rank_0.pid)
            assert {address.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}
        finally:
            rank_0.kill()


def test_a_stranger_is_told_nothing_but_the_mechanism() -> None:
    server = ControlServer([free_port("127.0.0.1")], OURS, arrival_of(0, 2), local_only=True)
    try:
        assert authentication_mechanism(("127.0.0.1", server.port)) == "CURVE"
    finally:
        server.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.listen()
        assert authentication_mechanism(silent.getsockname()) == ""


def test_frames_without_end_fill_no_memory() -> None:
    """ZMTP frames of one message, each below the limit of a message, from somebody without the secret."""
    server = ControlServer([free_port("127.0.0.1")], OURS, arrival_of(0, 2), local_only=True)
    before = _resident_bytes()
    frame = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # more to come, long
    sent = 0
    try:
        with socket.create_connection(("127.0.0.1", server.port), 2) as stranger:
            stranger.sendall((b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL").ljust(64, b"\0"))
            end = time.monotonic() + 5
            while sent < 200 and time.monotonic() < end:
                stranger.sendall(frame)
                sent += 1
    except OSError:
        pass  # cut off
    finally:
        server.close()
    assert sent < 200
    assert _resident_bytes() - before < 50 << 20


def test_a_connection_without_a_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "HANDSHAKE_MS", 200)
    server = ControlServer([free_port("127.0.0.1")], OURS, arrival_of(0, 2), local_only=True)
    with contextlib.closing(server), socket.create_connection(("127.0.0.1", server.port), 20) as silent:
        while silent.recv(1024):  # the server's greeting, then the end
            pass


@pytest.fixture
def own() -> Wire:
    """Of a run whose relay no other test has."""
    return Wire(f"run-{time.monotonic_ns()}", b"ours")


def test_a_relay_answers_only_who_holds_the_secret(own: Wire) -> None:
    relay, stranger = new_router(own), new_socket(zmq.DEALER)
    relay.bind(own.relay_address)
    OTHERS.lock_client(stranger)
    stranger.connect(own.relay_address)
    stranger.send_multipart(ROUTE_REQUEST)
    assert not relay.poll(300)
    client = RelayedClient(own, arrival_of(1, 2))
    assert relay.poll(5000)
    for end in (relay, stranger, client):
        end.close()


@pytest.mark.parametrize("wire", [OTHERS, NONE], ids=["another secret", "none"])
def test_a_rank_does_not_believe_a_relay_without_the_secret(own: Wire, wire: Wire) -> None:
    posing = new_router(wire)
    posing.bind(own.relay_address)
    client = RelayedClient(own, arrival_of(1, 2))
    assert not client.wait_for_answer(0.3)
    assert not posing.poll(0)
    client.close()
    posing.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_who_sends_a_greeting_byte_by_byte_holds_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            peer, _address = server.accept()
            with peer:
                while not over.wait(0.1):
                    with contextlib.suppress(OSError):
                        peer.send(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        assert authentication_mechanism(server.getsockname()) == ""
        assert time.monotonic() - begin < 5
        over.set()
        thread.join()


# The key file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_key(home: Path, text: str, mode: int = 0o600) -> Path:
    path = home / ".local" / "state" / "ddpdiag" / "key"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def across_hosts(*, required: bool = False, **environ: str) -> RunSecret:
    return RunSecret("run", environ, starts_all_ranks=False, is_local=False, is_required=required)


def test_the_token_comes_first(home: Path) -> None:
    write_key(home, "ab" * 32)
    secrets = across_hosts(DDPDIAG_TOKEN="t")
    assert (secrets.wire_of_rank_0()._secret, secrets.origin) == (b"t", Origin.TOKEN)


def test_ranks_of_one_host_make_a_key_wherever_the_home_is(home: Path) -> None:
    rank_0, rank = (RunSecret("run", {}, starts_all_ranks=False, is_local=True) for _ in range(2))
    wire, found = rank_0.wire_of_rank_0(), rank.find_rank_0()
    assert found is not None
    assert wire.is_locked
    assert wire._secret == found.wire._secret
    assert rank.origin is Origin.KEY_FILE


def test_then_the_key_file(home: Path) -> None:
    write_key(home, "ab" * 32)
    for secrets in (across_hosts(), across_hosts()):
        assert secrets.wire_of_rank_0()._secret == bytes.fromhex("ab" * 32)
        assert secrets.origin is Origin.KEY_FILE


def test_where_there_is_none_a_run_goes_on_without_and_leaves_no_file(home: Path) -> None:
    found = across_hosts().find_rank_0()
    assert found is not None
    assert not found.wire.is_locked
    assert not across_hosts().wire_of_rank_0().is_locked
    assert list(home.iterdir()) == []


def test_unless_one_is_required(home: Path) -> None:
    with pytest.raises(UsageError, match="--require-auth"):
        across_hosts(required=True).wire_of_rank_0()


@pytest.mark.parametrize(("text", "mode"), [("ab" * 32, 0o644), ("ab" * 31, 0o600), ("no key" * 20, 0o600)])
def test_a_key_file_that_others_may_read_or_that_holds_no_key_is_refused(home: Path, text: str, mode: int) -> None:
    path = write_key(home, text, mode)
    with pytest.raises(UsageError) as refused:
        across_hosts().wire_of_rank_0()
    assert str(refused.value).startswith(f"{path}: ")


def test_a_key_that_is_a_link_is_not_followed(home: Path, tmp_path: Path) -> None:
    path = write_key(home, "")
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert not across_hosts().wire_of_rank_0().is_locked


def test_a_new_key_is_whole_private_and_made_once(home: Path) -> None:
    folder = home / "state"
    key_file._create_key(str(folder))
    first = (folder / "key").read_text()
    key_file._create_key(str(folder))
    assert (folder / "key").read_text() == first
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    assert key_file._read_key(str(folder / "key")) == first.strip()


def test_a_home_that_does_not_answer_is_left_in_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_key(home, "")
    path.unlink()
    monkeypatch.setattr(key_file, "__file__", str(home / "hangs.py"))
    monkeypatch.setattr("ddpdiag.runtime.control.secret._KEY_FILE_SECONDS", 0.2)
    (home / "hangs.py").write_text("import time; time.sleep(60)")
    begin = time.monotonic()
    assert not across_hosts().wire_of_rank_0().is_locked
    assert time.monotonic() - begin < 10
