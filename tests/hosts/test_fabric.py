"""The search for the bad host, on eight hosts of one rank each."""

import json

import pytest
from launch import Bed, Launched, Launcher, launch

pytestmark = pytest.mark.hosts

CHECK = ("-m", "ddpdiag", "check", "--stage", "fabric", "--budget", "150", "--json", "{json}")
EIGHT = Bed(ranks=(1,) * 8, launcher=Launcher.HAND)


def judged(running: Launched, seconds: float = 160.0) -> dict:
    """The report of a run that is over."""
    try:
        assert running.is_over(seconds), running.told()
        return json.loads(running.json.read_text())
    finally:
        running.destroy()


def words(report: dict) -> list[str]:
    return [finding["code"] for finding in report["findings"] if finding["code"].startswith("FAB")]


def test_nobody_is_named_where_nothing_is_wrong(hosts, tmp_path):
    report = judged(launch(hosts(8), EIGHT, CHECK, tmp_path / "run"))
    assert words(report) == ["FAB001.clear"], report["findings"]
    assert report["verdict"] == "fit"
    assert report["measurements"]["fabric.rounds"] == 7


def test_a_slow_host_is_named_and_no_other(hosts, tmp_path):
    network = hosts(8)
    network[3].slow("50mbit")
    network[3].slow("50mbit", incoming=True)
    report = judged(launch(network, EIGHT, CHECK, tmp_path / "run"))
    (finding,) = [finding for finding in report["findings"] if finding["code"] == "FAB001.node"]
    assert finding["nodes"] == ["h3"], report["findings"]
    assert words(report) == ["FAB001.node"]
    assert report["hosts"]["bad"] == ["h3"]


def test_a_slow_way_between_two_blames_neither(hosts, tmp_path):
    network = hosts(8)
    network[2].slow("50mbit", towards=network[5])
    report = judged(launch(network, EIGHT, CHECK, tmp_path / "run"))
    assert words(report) == ["FAB001.path"], report["findings"]
    (finding,) = [finding for finding in report["findings"] if finding["code"] == "FAB001.path"]
    assert finding["links"] == ["h2 -> h5", "h5 -> h2"]
    assert finding["nodes"] == []


def test_where_most_are_slow_nobody_is_blamed(hosts, tmp_path):
    network = hosts(8)
    for host in list(network)[:6]:
        host.slow("50mbit")
        host.slow("50mbit", incoming=True)
    report = judged(launch(network, EIGHT, CHECK, tmp_path / "run"))
    assert words(report) == ["FAB001.systemic"], report["findings"]
    assert report["hosts"]["bad"] == []
