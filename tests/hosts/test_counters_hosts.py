"""What network ports count while a check runs: a link that flaps, and segments that arrive damaged."""

import json

import pytest
from launch import Bed, Launcher, launch

pytestmark = pytest.mark.hosts

CHECK = ("-m", "ddpdiag", "check", "--stage", "host,rendezvous,collective", "--budget", "60", "--json", "{json}")


def test_a_link_that_flaps_and_a_host_that_gets_damaged_segments_are_named(hosts, tmp_path):
    network = hosts(3)
    network[2].damage(2, senders=[network[0], network[1]])
    network[1].variables["DDPDIAG_TEST_FAULT"] = "pause 1"
    running = launch(network, Bed(ranks=(1, 1, 1), launcher=Launcher.HAND), CHECK, tmp_path / "run")
    try:
        assert running.wait_until_reached(60), running.told()
        network[1].cut()
        network[1].heal()
        assert running.is_over(60), running.told()
        report = json.loads(running.json.read_text())
    finally:
        running.destroy()
    found = {finding["code"]: finding for finding in report["findings"] if finding["code"].startswith("HST006")}
    flap = found.pop("HST006.link-down")
    assert (flap["severity"], flap["nodes"], flap["evidence"]["ports"]) == ("error", ["h1"], ["eth0"])
    assert "carrier_down_count rose from" in flap["message"]
    assert report["hosts"]["bad"] == ["h1"]
    damage = found.pop("HST006.damaged")
    assert (damage["severity"], damage["nodes"]) == ("warning", ["h2"])
    assert found == {}
