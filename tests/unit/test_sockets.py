"""What a connect can end with, on loopback only."""

import socket
from collections.abc import Iterator

import pytest

from ddpdiag.model import RunOptions
from ddpdiag.probes.net import tcp_connect
from ddpdiag.probes.net.tcp_connect import Reach, allowed_ports, free_port, is_loopback, resolve, try_connect


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        yield server


def port_of(server: socket.socket) -> int:
    return server.getsockname()[1]


def test_a_connect_is_accepted_refused_dropped_or_has_an_unknown_name(listener):
    accepted = try_connect("127.0.0.1", port_of(listener), 5.0)
    assert (accepted.reach, accepted.address, accepted.source) == (Reach.ACCEPTED, "127.0.0.1", "127.0.0.1")
    assert accepted.seconds < 5.0
    refused = try_connect("127.0.0.1", free_port("127.0.0.1"), 5.0)
    assert (refused.reach, refused.address, refused.source) == (Reach.REFUSED, "127.0.0.1", None)
    unknown = try_connect("no-such-host.invalid", 80, 5.0)
    assert (unknown.reach, unknown.address) == (Reach.UNKNOWN_NAME, None)
    # Linux admits one more than the backlog, then answers nothing.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        assert try_connect("127.0.0.1", port_of(server), 0.1).reach is Reach.DROPPED


@pytest.mark.parametrize("name", ["a" * 64, "a\0b", "ä" * 64, "."])
def test_what_cannot_be_a_name_is_unknown(name):
    assert resolve(name, 80, 5.0) == ()


def test_a_resolver_that_hangs_is_given_up(monkeypatch):
    released = socket.socketpair()
    monkeypatch.setattr(tcp_connect.socket, "getaddrinfo", lambda *_, **__: released[0].recv(1) and [])
    assert resolve("slow", 80, 0.01) is None
    assert try_connect("slow", 80, 0.01).reach is Reach.SLOW_NAME
    released[1].send(b"xx")
    for end in released:
        end.close()


def test_of_several_addresses_the_one_that_accepts_counts(listener, monkeypatch):
    addresses = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(tcp_connect.socket, "getaddrinfo", lambda *_, **__: addresses)
    found = try_connect("both", port_of(listener), 5.0)
    assert (found.reach, found.address) == (Reach.ACCEPTED, "127.0.0.1")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"), True),
        (("10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "0.0.0.0"), False),
    ],
)
def test_loopback_addresses_are_known(addresses, expected):
    assert {is_loopback(address) for address in addresses} == {expected}


def test_a_port_is_taken_from_the_range_and_not_the_one_that_is_held(listener):
    held, free = port_of(listener), free_port("127.0.0.1")
    assert free_port("127.0.0.1", (held, free)) == free
    with pytest.raises(OSError, match="in use"):
        free_port("127.0.0.1", (held,))


def test_a_store_may_listen_anywhere_unless_there_is_a_range():
    assert allowed_ports(RunOptions()) == (0,)
    assert allowed_ports(RunOptions(port_range="29500-29502")) == (29500, 29501, 29502)
