"""A firewall of one host drops connections to the ports that process groups use (R3, R5): torch hangs."""

from fault import Blame, Fault
from launch import Bed


def before(network):
    network[0].block(port="32768:60999", new=True)


FAULT = Fault(
    expect=("RDZ004.dropped",),
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1)),
    options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
    good={"h1", "h2"},
)
