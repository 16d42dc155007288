"""The mesh between listeners and callers, on loopback."""

import socket
import threading
import time

import pytest

from ddpdiag.probes.net import mesh, mesh_listener
from ddpdiag.probes.net.mesh import Cell, Connection, Peer, survey
from ddpdiag.probes.net.mesh_listener import (
    DONE,
    KIB,
    LARGE_SIZE,
    REQUEST,
    TOKEN_BYTES,
    Listener,
    Request,
    receive,
    request,
)
from ddpdiag.probes.net.tcp_connect import Reach, free_port, tcp_info

SECONDS = 20.0


@pytest.fixture
def listener():
    opened = Listener((0,), threading.Lock(), time.monotonic() + SECONDS)
    yield opened
    opened.close()


def peer_of(listener: Listener, number: int = 0, **more: object) -> Peer:
    values = {"offered": "127.0.0.1", "host": "127.0.0.1", "port": listener.port, "token": listener.token} | more
    return Peer(rank=number, number=number, **values)  # type: ignore[arg-type]


def surveyed(size: int) -> list[tuple[Cell, ...]]:
    """What each of `size` hosts finds, all in this process."""
    end = time.monotonic() + SECONDS
    turns = [threading.Lock() for _ in range(size)]
    listeners = [Listener((0,), turn, end) for turn in turns]
    peers = [peer_of(listener, number) for number, listener in enumerate(listeners)]
    found: list[tuple[Cell, ...]] = [()] * size

    def run(own: int) -> None:
        others = [peer for peer in peers if peer.number != own]
        found[own] = survey(others, own, listeners[own], turns[own], end, lambda step: None, addresses=1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_everybody_measures_the_way_to_everybody_else(size):
    found = surveyed(size)
    for own, cells in enumerate(found):
        assert sorted(cell.peer for cell in cells) == [peer for peer in range(size) if peer != own]
        for cell in cells:
            assert (cell.reach, cell.passed_bytes, cell.stalled_bytes) == (Reach.ACCEPTED, LARGE_SIZE, None)
            assert cell.bytes_per_s is not None
            assert cell.bytes_per_s > 0


def test_a_closed_port_is_refused_and_the_known_address_is_the_second_choice(listener):
    connection = Connection(peer_of(listener, port=free_port("127.0.0.1")))
    assert (connection.is_open, connection.cell.reach) == (False, Reach.REFUSED)
    connection = Connection(peer_of(listener, offered="0.0.0.1"))
    connection.close()
    assert (connection.cell.reach, connection.cell.address) == (Reach.ACCEPTED, "127.0.0.1")
    assert connection.cell.offered_reach is not None


def test_a_wrong_token_and_another_process_behind_the_port_are_noticed(listener):
    wrong = Connection(peer_of(listener, token="0" * TOKEN_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = Connection(peer_of(listener, port=server.getsockname()[1]))
        server.accept()[0].close()
        for connection in (wrong, other):
            connection.try_sizes(1)
            assert (connection.cell.stalled_bytes, connection.cell.broken, connection.is_open) == (0, True, False)


def greeted(listener: Listener) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", listener.port), SECONDS)
    sock.sendall(request(Request.HELLO, 1) + listener.token.encode())
    assert receive(sock, len(DONE), SECONDS) == DONE
    return sock


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", REQUEST.pack(b"d", 1 << 31), REQUEST.pack(b"?", 0)])
def test_noise_ends_a_connection_and_not_the_listener(listener, noise):
    with greeted(listener) as sock:
        sock.sendall(noise)
        with pytest.raises((ConnectionError, TimeoutError)):
            receive(sock, 1, SECONDS)
    greeted(listener).close()


def test_a_caller_that_hangs_up_gives_its_turn_back():
    turn = threading.Lock()
    listener = Listener((0,), turn, time.monotonic() + SECONDS)
    with greeted(listener) as sock:
        sock.sendall(request(Request.TURN, 1000))
        receive(sock, 1, SECONDS)
        assert turn.locked()
    assert turn.acquire(timeout=SECONDS)
    listener.close()


def test_a_listener_waits_for_its_callers_and_not_for_those_who_never_came(listener):
    begin = time.monotonic()
    listener.wait(1, late=begin)
    greeted(listener).close()
    listener.wait(1, late=begin + SECONDS)


def test_a_listener_takes_the_first_free_port_of_a_range(listener):
    free = free_port()
    other = Listener((listener.port, free), threading.Lock(), time.monotonic() + SECONDS)
    assert other.port == free
    other.close()
    with pytest.raises(OSError, match="in use"):
        Listener((listener.port,), threading.Lock(), time.monotonic())


def test_the_kernel_counts_what_was_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        called = server.accept()[0]
    with caller, called:
        before = tcp_info(caller)
        caller.sendall(bytes(1000))
        assert receive(called, 1000, SECONDS) == bytes(1000)
        after = tcp_info(caller)
    assert before is not None
    assert after is not None
    assert after.segments > before.segments
    assert after.acknowledged_bytes <= before.acknowledged_bytes + 1000


def test_a_way_that_trickles_is_slow_and_does_not_last_for_ever(listener, monkeypatch):
    monkeypatch.setattr(mesh, "_SMALL_SECONDS", 0.1)
    over, swallow = threading.Event(), mesh_listener._discard
    monkeypatch.setattr(
        mesh_listener, "_discard", lambda sock, count: swallow(sock, count) if count <= KIB else over.wait(SECONDS)
    )
    connection = Connection(peer_of(listener))
    connection.try_sizes(1)
    over.set()
    assert (connection.is_open, connection.cell.passed_bytes, connection.cell.stalled_bytes) == (False, KIB, None)
    assert connection.cell.bytes_per_s is not None
