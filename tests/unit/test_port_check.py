"""A listener of our own and its callers, on loopback only."""

import os
import socket

import pytest

from ddpdiag.probes.net.interfaces import ephemeral_ports, is_local
from ddpdiag.probes.net.tcp_connect import PortListener, Reach, check_port, free_port, is_answered


@pytest.fixture
def listener():
    port = free_port()
    own = PortListener(port, "word", {"3", "7"})
    own.port = port
    yield own
    own.close()


def test_a_visitor_receives_the_word_and_only_those_expected_count(listener):
    for who in ("3", "3", "a scanner"):
        found = check_port("127.0.0.1", listener.port, 5.0, caller=who, word="word")
        assert (found.reached.reach, found.listener_answered) == (Reach.ACCEPTED, True)
        assert is_answered(found)
    assert not listener.wait(0.05)
    check_port("127.0.0.1", listener.port, 5.0, caller="7", word="word")
    assert listener.wait(5.0)


def test_silent_connections_keep_no_host_waiting(listener):
    silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(300)]
    for who in ("3", "7"):
        assert is_answered(check_port("127.0.0.1", listener.port, 0.9, caller=who, word="word"))
    assert listener.wait(0.9)
    for sock in silent:
        sock.close()


def test_another_word_is_a_strangers(listener):
    found = check_port("127.0.0.1", listener.port, 5.0, caller="3", word="other")
    assert (found.reached.reach, found.listener_answered) == (Reach.ACCEPTED, False)
    assert not is_answered(found)


def test_whoever_answers_is_right_where_no_word_is_expected(listener):
    found = check_port("127.0.0.1", listener.port, 5.0, caller="3", word=None)
    assert found.listener_answered is None
    assert is_answered(found)


def test_a_port_that_is_held_raises_and_is_free_after_a_door_is_closed(listener):
    with pytest.raises(OSError, match="in use"):
        PortListener(listener.port, "word", ())
    listener.close()
    PortListener(listener.port, "word", ()).close()


def test_a_host_knows_its_own_addresses():
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")
    assert not is_local("2001:db8::1")


def test_the_range_of_outgoing_connections_is_read(tmp_path):
    folder = tmp_path / "sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("32768\t60999\n")
    assert ephemeral_ports(tmp_path) == (32768, 60999)
    assert ephemeral_ports(tmp_path / "none") is None
    (folder / "ip_local_port_range").write_text(f"{os.sep}\n")
    assert ephemeral_ports(tmp_path) is None


def test_where_addresses_cannot_be_listed_binding_tells(monkeypatch):
    monkeypatch.setattr("ddpdiag.probes.net.interfaces.own_addresses", lambda: None)
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")
