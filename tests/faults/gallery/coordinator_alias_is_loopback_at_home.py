"""MASTER_ADDR is an alias that means loopback on its own host, and only there: odd, and the job works."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    for host in network:
        host.resolve("head", network[0].address)
    network[0].resolve("head", "127.0.0.1")


FAULT = Fault(
    expect=("RDZ002.loopback",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, coordinator="head"),
)
