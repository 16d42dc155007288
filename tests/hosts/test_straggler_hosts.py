"""The rank for which all wait because of its network: of three hosts, one has a cable of a twentieth of the others'."""

import pytest
from launch import Bed, Launcher, launch, report_of

# What is judged is of test_trn003.py.
pytestmark = [pytest.mark.hosts, pytest.mark.alone, pytest.mark.deep]

CHECK = ("-m", "ddpdiag", "check", "--select", "LCH003,TRN003", "--budget", "120", "--json", "{json}")


def test_a_slow_network_is_named_as_what_all_wait_for(hosts, tmp_path):
    network = hosts(3)
    for host in network:
        rate = "50mbit" if host.index == 1 else "1gbit"
        host.slow(rate)
        host.slow(rate, incoming=True)
    report = report_of(launch(network, Bed(ranks=(1, 1, 1), launcher=Launcher.HAND), CHECK, tmp_path / "run"))
    (found,) = [finding for finding in report["findings"] if finding["code"] in ("TRN003.straggler", "TRN003.network")]
    assert found["evidence"]["class"] == "network"
    assert found["ranks"] == [1] or found["hosts"] == ["h1"]
