"""A firewall of one host rejects connections to the ports that process groups use (R4, R5)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].block(port="32768:60999", reject=True, new=True)


FAULT = Fault(
    expect=("RDZ004.refused",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous", "--set", "RDZ001.deadline_seconds=8"),
)
