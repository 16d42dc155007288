"""The fallback search between hosts: two namespaces, a backend that stands in for NCCL (tests/inject/standin.py)."""

import json

import pytest
from launch import Bed, Launcher, launch, report_of
from network import Network

pytestmark = pytest.mark.hosts

# What hangs costs this long, twice.
SECONDS = 6
CHECK = (
    *("-m", "ddpdiag", "check", "--backend", "standin", "--json", "{json}"),
    *("--select", "LCH002,HST004,RDZ003,COL001,P2P003"),
    *("--set", f"COL001.deadline_seconds={SECONDS}", "--set", f"P2P003.deadline_seconds={SECONDS}"),
)


def fallback(network: Network, folder, *faults: dict, ranks: tuple[int, ...] = (2, 2)) -> dict:
    """What P2P003 says of a backend with these faults."""
    for host in network:
        host.variables["DDPDIAG_TEST_STANDIN"] = json.dumps(faults)
    running = launch(network, Bed(ranks=ranks, launcher=Launcher.HOST), CHECK, folder / "run")
    report = report_of(running, clean=True)
    (finding,) = [finding for finding in report["findings"] if finding["code"].startswith("P2P003")]
    assert finding["code"] == "P2P003.fallback", running.told()
    assert report["workarounds"] == finding["env"]
    return finding


# Where it fails is judged in test_p2p003.py.
@pytest.mark.deep
def test_what_hangs_between_hosts_only_is_told_from_what_fails_inside_them(hosts, tmp_path):
    found = fallback(hosts(2), tmp_path, {"kind": "hang", "across": True, "unless": [{"NCCL_NET_PLUGIN": "none"}]})
    assert found["env"] == {"NCCL_NET_PLUGIN": "none"}
    assert (found["ranks"], found["hosts"], found["links"]) == ([], [], [])


# On one host: test_fallback.py; what helps between hosts is tried in test_fallback_places.py.
@pytest.mark.deep
def test_of_two_interfaces_the_one_that_carries_is_exported(hosts, tmp_path):
    network = hosts(2)
    for host in network:
        host.plug("eth1", f"192.168.121.{host.index + 1}/24")
    fault = {"kind": "raise", "across": True, "unless": [{"NCCL_SOCKET_IFNAME": "=eth1"}]}
    found = fallback(network, tmp_path, fault, ranks=(1, 1))
    assert found["env"] == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert (found["ranks"], found["hosts"], found["links"]) == ([], [], [])


@pytest.mark.deep
def test_a_host_that_alone_fails_inside_is_named(hosts, tmp_path):
    found = fallback(hosts(2), tmp_path, {"kind": "raise", "pair": [2, 3], "unless": [{"NCCL_P2P_DISABLE": "1"}]})
    assert found["env"] == {"NCCL_P2P_DISABLE": "1"}
    assert (found["ranks"], found["hosts"]) == ([], ["h1"])
