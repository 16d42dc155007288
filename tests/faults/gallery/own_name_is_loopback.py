"""Debian's line `127.0.1.1 <host name>` on one of three hosts (G1): gloo offers its peers an address of their own."""

from fault import Blame, Fault
from launch import Bed


def before(network):
    network[1].resolve("h1", "127.0.1.1")


FAULT = Fault(
    expect=("RDZ002.own",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1)),
    options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
)
