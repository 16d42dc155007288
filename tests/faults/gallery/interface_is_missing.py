"""GLOO_SOCKET_IFNAME names an interface that one host does not have (G3): its peers only wait."""

from fault import Blame, Fault
from launch import Bed


def before(network):
    network[1].variables["GLOO_SOCKET_IFNAME"] = "eno1"


FAULT = Fault(
    expect=("RDZ003.missing",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1)),
    options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
)
