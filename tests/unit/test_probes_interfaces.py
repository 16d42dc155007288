"""Which interface gloo and NCCL would choose."""

import socket

import pytest

from ddpdiag.probes.net import interfaces as probe
from ddpdiag.probes.net.interfaces import (
    Ifnames,
    Interface,
    chosen_address,
    ifnames,
    interface_of,
    interfaces,
    nccl_allows_interface,
    nccl_interfaces,
    offered_address,
    reverse_lookup_seconds,
    source_towards,
)

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ETH0 = Interface(name="eth0", addresses=("10.0.0.1", "fe80::1%eth0"))
ETH1 = Interface(name="eth1", addresses=("192.168.0.1",))
IB0 = Interface(name="ib0", addresses=("10.1.0.1",))
DOCKER0 = Interface(name="docker0", addresses=("172.17.0.1",))
BARE = Interface(name="eth2")


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,lo", ["eth1", "lo"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker", ["eth0", "eth1", "lo"]),
        ("^=eth0,lo", ["docker0", "eth1"]),
        ("eth0:1", ["eth0"]),
        ("^", []),
    ],
)
def test_nccl_takes_prefixes_exact_names_and_exclusions(rule, taken):
    assert [name for name in ("docker0", "eth0", "eth1", "lo") if nccl_allows_interface(rule, name)] == taken


@pytest.mark.parametrize(
    ("rule", "known", "chosen"),
    [
        (None, (LO, DOCKER0, ETH0, IB0), (IB0,)),
        (None, (LO, DOCKER0, ETH0, ETH1), (ETH0, ETH1)),
        (None, (LO, DOCKER0), (DOCKER0,)),
        (None, (LO,), (LO,)),
        ("eth", (Interface(name="eth3", addresses=("10.3.0.1",), running=False), BARE), ()),
    ],
    ids=["InfiniBand", "all others", "docker", "loopback", "down or without address"],
)
def test_nccl_prefers_infiniband_and_leaves_docker_and_loopback_for_the_end(rule, known, chosen):
    assert nccl_interfaces(rule, known) == chosen


@pytest.mark.parametrize(
    ("rule", "own", "chosen", "offered"),
    [
        ("eth1,eth0", (), "192.168.0.1", "192.168.0.1"),
        ("eth", (), None, None),
        ("eth2", (), None, None),
        (None, ("10.0.0.1",), "10.0.0.1", "10.0.0.1"),
        ("", (), "127.0.0.1", None),
        ("lo", (), "127.0.0.1", None),
        ("eth4", (), "fe80::4%eth4", None),
    ],
    ids=["first exact name", "a prefix", "no address", "its name", "loopback", "loopback by name", "link-local"],
)
def test_gloo_offers_the_first_address_of_the_first_exact_name_that_others_can_use(rule, own, chosen, offered):
    known = (LO, ETH0, ETH1, BARE, Interface(name="eth4", addresses=("fe80::4%eth4",)))
    assert chosen_address("gloo", Ifnames(rule, None), own, known) == chosen
    assert offered_address("gloo", Ifnames(rule, None), own, known) == offered
    assert chosen_address("nccl", Ifnames(rule, "eth0"), own, known) == "10.0.0.1"


def test_an_address_leads_to_its_interface_whatever_its_zone():
    assert interface_of("fe80::1", (LO, ETH0)) is ETH0
    assert interface_of("10.9.9.9", (LO, ETH0)) is None
    assert interface_of(None, (LO, ETH0)) is None


def test_nccls_files_count_after_the_environment(tmp_path):
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_SOCKET_IFNAME=ib0\n")
    assert ifnames({"NCCL_CONF_FILE": str(conf)}) == Ifnames(None, "ib0")
    both = {"NCCL_CONF_FILE": str(conf), "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1"}
    assert ifnames(both) == Ifnames("eth1", "eth0")


def test_this_machine_has_a_loopback_interface_without_a_nominal_speed(tmp_path):
    (lo,) = [interface for interface in interfaces(tmp_path) or () if interface.name == "lo"]
    assert "127.0.0.1" in lo.addresses
    assert (lo.running, lo.bytes_per_s) == (True, None)


def test_a_loopback_address_says_nothing_about_the_way_to_others():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))
        except OSError:
            assert source_towards(("127.0.1.1",)) is None
        else:
            assert source_towards(("127.0.1.1",)) == sock.getsockname()[0]


def test_a_name_server_that_is_silent_is_given_up(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(probe.socket, "getnameinfo", lambda *_: ours.recv(1))
    assert reverse_lookup_seconds("10.0.0.1", 0.01) is None
    theirs.send(b"x")
    theirs.close()
    ours.close()
