"""What network ports count while a check runs: a link that flaps, and segments that arrive damaged."""

import pytest
from launch import Bed, Launcher, launch, report_of

# What is judged is of test_hst006.py.
pytestmark = [pytest.mark.hosts, pytest.mark.deep]

CHECK = ("-m", "ddpdiag", "check", "--stage", "host,rendezvous,collective", "--budget", "120", "--json", "{json}")


def test_a_link_that_flaps_and_a_host_that_gets_damaged_segments_are_named(hosts, tmp_path):
    network = hosts(3)
    network[2].damage(2, senders=[network[0], network[1]])
    network[1].variables["DDPDIAG_TEST_FAULT"] = "pause 1"
    running = launch(network, Bed(ranks=(1, 1, 1), launcher=Launcher.HAND), CHECK, tmp_path / "run")
    try:
        assert running.wait_until_reached(60), running.told()
        network[1].cut()
        network[1].heal()
    except BaseException:
        running.destroy()
        raise
    report = report_of(running)
    found = {finding["code"]: finding for finding in report["findings"] if finding["code"].startswith("HST006")}
    flap = found.pop("HST006.link-down")
    assert (flap["severity"], flap["hosts"], flap["evidence"]["ports"]) == ("error", ["h1"], ["eth0"])
    assert "carrier_down_count" in flap["message"]
    # A segment whose checksum is wrong is lost. TCP sends about 1 % again here, which is RDZ004's limit for an error.
    assert {"h1"} <= set(report["hosts"]["failing"]) <= {"h1", "h2"}
    damage = found.pop("HST006.damaged")
    assert (damage["severity"], damage["hosts"]) == ("warning", ["h2"])
    assert found == {}
    counters = {(row["host"], row["part"]): row["totals"] for row in report["counters"]}
    assert counters.keys() == {(f"h{host}", part) for host in range(3) for part in ("eth0", "TCP")}
    assert counters["h1", "eth0"]["carrier_down_count"] > 0
    assert counters["h2", "TCP"]["damaged_segments"] > 3
    assert counters["h0", "TCP"]["sent_segments"] > 1000
