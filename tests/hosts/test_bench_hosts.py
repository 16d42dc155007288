"""The benchmark on several hosts: namespaces."""

import time
from collections.abc import Callable

import pytest
from launch import Bed, Launcher, launch, report_of
from network import Network

pytestmark = pytest.mark.hosts

BENCH = ("-m", "ddpdiag", "allreduce-bench", "--json", "{json}")
SHORT = (*BENCH, "-b", "1K", "-e", "4M", "-f", "16", "-n", "5")


@pytest.mark.parametrize("launcher", [Launcher.HAND, pytest.param(Launcher.TORCHRUN, marks=pytest.mark.deep)])
def test_three_hosts(hosts, tmp_path, launcher):
    report = report_of(launch(hosts(3), Bed(ranks=(1, 1, 1), launcher=launcher), SHORT, tmp_path / "run"))
    assert report["exit_code"] == 0
    bench = report["bench"]
    assert [row["size_bytes"] for row in bench["rows"]] == [1 << 10, 1 << 14, 1 << 18, 1 << 22]
    assert {line["host"] for line in bench["ranks"]} == {"h0", "h1", "h2"}
    assert all(row["wrong"] == 0 for row in bench["rows"])


def calls_go_on(network: Network) -> Callable[[], bool]:
    """Whether ten more MB went over the first host's cable since it was asked for this."""

    def sent() -> int:
        return int(network[0].call("cat", "/sys/class/net/eth0/statistics/tx_bytes"))

    before = sent()
    return lambda: sent() > before + 10_000_000


@pytest.mark.deep
def test_a_rank_of_another_host_that_is_killed_leaves_what_was_measured(hosts, tmp_path):
    network = hosts(2)
    options = ("-b", "64K", "-e", "60M", "-f", "1.01", "-T", "100")
    running = launch(network, Bed(ranks=(1, 1), launcher=Launcher.HAND), (*BENCH, *options), tmp_path / "run")
    try:
        for _ in range(4):
            running.jobs["rank0"].wait_until(calls_go_on(network), 60)
            time.sleep(0.7)  # results are handed over every half second
        running.jobs["rank1"].worker(1).kill(9)
    except BaseException:
        running.destroy()
        raise
    report = report_of(running)
    assert report["exit_code"] == 1
    assert report["bench"]["rows"]
    assert not report["bench"]["complete"]
    assert {rank for finding in report["findings"] if finding["severity"] == "error" for rank in finding["ranks"]} == {
        1
    }
