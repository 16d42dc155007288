"""The name server says nothing, and one host knows rank 0 by its address alone (R7): each connection waits for it."""

from fault import Blame, Fault
from launch import Bed, Launcher
from network import NET


def before(network):
    network[0].call("iptables", "-w", "-A", "INPUT", "-p", "udp", "--dport", "53", "-j", "DROP")
    network[2].resolve("h0", None)
    (network[2].folder / "resolv.conf").write_text(f"nameserver {network[0].address}\noptions timeout:2 attempts:1\n")


FAULT = Fault(
    expect=("RDZ002.reverse",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, coordinator=f"{NET}.1"),
    options=("--stage", "rendezvous"),
)
