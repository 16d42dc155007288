"""The benchmark on several hosts: three namespaces, two of them with a slow cable between."""

import json

import pytest
from launch import Bed, Launched, Launcher, launch

pytestmark = pytest.mark.hosts

BENCH = ("-m", "ddpdiag", "allreduce-bench", "-b", "1K", "-e", "4M", "-f", "16", "-n", "5", "--json", "{json}")


def measured(running: Launched, seconds: float = 90.0) -> dict:
    """The JSON of a run that is over."""
    try:
        assert running.is_over(seconds), running.told()
        return json.loads(running.json.read_text())
    finally:
        running.destroy()


@pytest.mark.parametrize("launcher", [Launcher.TORCHRUN, Launcher.HAND])
def test_three_hosts(hosts, tmp_path, launcher):
    report = measured(launch(hosts(3), Bed(ranks=(1, 1, 1), launcher=launcher), BENCH, tmp_path / "run"))
    assert report["exit_code"] == 0
    assert [row["size"] for row in report["results"]] == [1 << 10, 1 << 14, 1 << 18, 1 << 22]
    assert {device["hostname"] for device in report["config"]["devices"]} == {"h0", "h1", "h2"}
    assert all(row["in_place"]["nwrong"] == 0 for row in report["results"])


def test_a_host_with_a_slow_cable_is_named(hosts, tmp_path):
    network = hosts(3)
    network[1].slow("100mbit")
    network[1].slow("100mbit", incoming=True)
    report = measured(launch(network, Bed(ranks=(1, 1, 1), launcher=Launcher.ENV), BENCH, tmp_path / "run"))
    slow = {line["rank"]: line["slow"] for line in report["per_rank"]}
    assert slow[1], report
    assert not slow[0]
    assert not slow[2]
    assert "rank 1 on h1" in report["verdict"]["sentence"]


def test_a_rank_of_another_host_that_is_killed_leaves_what_was_measured(hosts, tmp_path):
    network = hosts(2)
    for host in network:
        host.variables["DDPDIAG_TEST_FAULT"] = "pause 1"
    options = (*BENCH[:3], "-b", "64K", "-e", "64K", "-n", "20", "-N", "0", "-T", "40", "--json", "{json}")
    running = launch(network, Bed(ranks=(1, 1), launcher=Launcher.HAND), options, tmp_path / "run")
    try:
        assert running.wait_until_reached(60)
        assert not running.is_over(6)  # the pause is of 2 s; then results come every half second
        running.in_fault(1).kill(9)
    except BaseException:
        running.destroy()
        raise
    report = measured(running)
    assert report["exit_code"] == 1
    assert report["results"]
    assert not report["complete"]
    assert {culprit["ranks"][0] for culprit in report["verdict"]["culprits"] if culprit["ranks"]} == {1}
