"""RDMA ports of three hosts over a real network, each with a made-up /sys: one port has half the rate of the others."""

import pytest
from launch import Bed, Launcher, launch, report_of
from rails import ROCE, Rail, tree

pytestmark = [pytest.mark.hosts, pytest.mark.deep]

CHECK = ("-m", "ddpdiag", "check", "--stage", "host,rendezvous,collective", "--budget", "120", "--json", "{json}")


def test_a_roce_port_at_half_its_rate_below_the_interface_of_the_job_is_named(hosts, tmp_path):
    network = hosts(3)
    gids = tuple((address, kind, "eth0") for address, kind, _ in ROCE)
    for number, rate in enumerate(("100 Gb/sec (4X EDR)", "50 Gb/sec (2X EDR)", "100 Gb/sec (4X EDR)")):
        folder = network.folder / f"sys-{number}"
        tree(folder, (Rail("mlx5_0", 0, "Ethernet", rate=rate, gids=gids),), gpus=0)
        network[number].variables["DDPDIAG_SYSFS"] = str(folder)
    report = report_of(launch(network, Bed(ranks=(1, 1, 1), launcher=Launcher.HAND), CHECK, tmp_path / "run"))
    (finding,) = (own for own in report["findings"] if own["code"].startswith("HST007"))
    assert (finding["code"], finding["severity"], finding["nodes"]) == ("HST007.slow", "warning", ["h1"])
    assert (finding["evidence"]["ports"], finding["evidence"]["bytes_per_s"]) == (["mlx5_0:1"], [6.25e9])
    assert report["measurements"]["rdma.min_port_bytes_per_s"] == 6.25e9
