"""Families and names of addresses."""

import socket

import pytest

from ddpdiag.probes.net import interfaces
from ddpdiag.probes.net.interfaces import family_of, is_reachable, own_families, reverse_seconds


@pytest.mark.parametrize(("address", "family"), [("10.0.0.1", "IPv4"), ("fd00::1", "IPv6"), ("fe80::1%eth0", "IPv6")])
def test_an_address_has_a_family(address, family):
    assert family_of(address) == family


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "fd00::1", "2001:db8::1"])
def test_addresses_beyond_the_own_cable_can_be_reached(address):
    assert is_reachable(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "169.254.1.1", "fe80::1%eth0", "0.0.0.0"])
def test_loopback_and_link_local_addresses_cannot(address):
    assert not is_reachable(address)


def test_this_hosts_families_are_told():
    assert set(own_families()) <= {"IPv4", "IPv6"}


def test_the_name_of_an_address_is_looked_up_in_time():
    assert (reverse_seconds("127.0.0.1", 30.0) or 0.0) < 30.0


def test_a_name_server_that_is_silent_is_given_up(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(interfaces.socket, "getnameinfo", lambda *_: ours.recv(1))
    assert reverse_seconds("10.0.0.1", 0.01) is None
    theirs.send(b"x")
    theirs.close()
    ours.close()


def test_where_the_kernel_lists_no_addresses_their_families_are_unknown(monkeypatch):
    def refuse():
        raise PermissionError

    monkeypatch.setattr("psutil.net_if_addrs", refuse)
    assert own_families() is None
