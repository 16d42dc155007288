"""GLOO_SOCKET_IFNAME names a bridge that leads nowhere on one host (G4)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].add_bridge("br0", "10.99.0.1/24")
    network[1].variables["GLOO_SOCKET_IFNAME"] = "br0"


FAULT = Fault(
    expect=("RDZ003.wrong",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
)
