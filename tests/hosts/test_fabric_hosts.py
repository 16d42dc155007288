"""The search for the bad host, on eight hosts of one rank each.

Their cables carry 160 Mbit/s, so that these decide and not how eight processes share the cores of this machine.
"""

import pytest
from launch import Bed, Launcher, launch, report_of

# What is planned and judged is of test_fab001.py, test_fabric.py and test_simulate.py.
pytestmark = [pytest.mark.hosts, pytest.mark.deep]

CHECK = (
    *("-m", "ddpdiag", "check", "--stage", "fabric", "--budget", "150", "--json", "{json}"),
    *("--set", "FAB001.least_bytes_per_s=1e6", "--set", "FAB001.floor_share=0.4"),
)
EIGHT = Bed(ranks=(1,) * 8, launcher=Launcher.HAND)


@pytest.fixture
def eight(hosts):
    """Eight hosts; those in `slow` have cables of a quarter of the others' rate."""

    def make(slow=()):
        network = hosts(8)
        for host in network:
            rate = "40mbit" if host.index in slow else "160mbit"
            host.slow(rate)
            host.slow(rate, incoming=True)
        return network

    return make


def found(report: dict) -> dict[str, dict]:
    """The findings of the search."""
    return {finding["code"]: finding for finding in report["findings"] if finding["code"].startswith("FAB")}


def test_a_slow_host_is_named_and_a_slow_way_between_two_others_blames_neither(eight, tmp_path):
    network = eight(slow=[3])
    network[2].heal()
    network[2].slow("160mbit", incoming=True)
    network[2].slow("20mbit", towards=network[5])
    report = report_of(launch(network, EIGHT, CHECK, tmp_path / "run"))
    own = found(report)
    assert set(own) == {"FAB001.host", "FAB001.path", "FAB001.clear"}, report["findings"]
    assert own["FAB001.host"]["hosts"] == ["h3"]
    assert own["FAB001.path"]["links"] == ["h2 -> h5", "h5 -> h2"]
    assert own["FAB001.path"]["hosts"] == []
    assert report["hosts"]["failing"] == ["h3"]
    assert report["measurements"]["fabric.rounds"] >= 7


def test_a_shared_bottleneck_behind_two_leaves_is_named_and_no_host(hosts, tmp_path):
    network = hosts(8)
    for host in network:
        host.slow("80mbit")
        host.slow("80mbit", incoming=True)
    # A pair alone reaches a quarter of what it does inside; most rounds have two or four pairs across.
    network.split(network.hosts[4:], "20mbit")
    check = (*CHECK, "--set", "FAB001.least_bytes_per_s=1e5")
    report = report_of(launch(network, EIGHT, check, tmp_path / "run"))
    own = found(report)
    assert set(own) == {"FAB001.congested", "FAB001.clear"}, report["findings"]
    evidence = own["FAB001.congested"]["evidence"]
    assert evidence["hosts"] == [f"h{host}" for host in range(8)]
    assert evidence["loaded_bytes_per_s"] < evidence["usual_bytes_per_s"] / 2
    assert report["hosts"]["failing"] == []
    assert not any(finding["hosts"] or finding["links"] for finding in own.values())


def test_where_most_hosts_are_slow_nobody_is_blamed(eight, tmp_path):
    report = report_of(launch(eight(slow=range(6)), EIGHT, CHECK, tmp_path / "run"))
    assert list(found(report)) == ["FAB001.systemic"], report["findings"]
    assert report["hosts"]["failing"] == []


def test_a_host_that_is_cut_off_in_the_middle_is_named_and_the_others_get_their_verdict(eight, tmp_path):
    network = eight()
    network[6].variables["DDPDIAG_TEST_FAULT"] = "pause 6"
    running = launch(network, EIGHT, CHECK, tmp_path / "run")
    reached = running.wait_until_reached(60)
    network[6].cut()
    report = report_of(running)
    assert reached, running.told()
    assert (report["exit_code"], report["hosts"]["failing"], len(report["hosts"]["healthy"])) == (1, ["h6"], 7), report
