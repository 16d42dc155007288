"""The coordinator has an IPv6 address only, and one host has IPv6 switched off (R15): its rank cannot come."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    for host in network:
        host.call("ip", "addr", "add", f"fd00::{host.index + 1}/64", "dev", "eth0", "nodad")
        host.resolve("h0", "fd00::1")
    network[2].call("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")


FAULT = Fault(
    expect=("RUN001.absent",),
    blame=Blame(ranks={2}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch", "--board-wait", "8", "--shared-dir", "{shared}"),
    says={"rank2": "unreachable"},
    exit_code=3,
)
