"""A smaller MTU on the way to one host, and ICMP filtered (G6): small messages pass, large ones never arrive."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].swallow_large()


FAULT = Fault(
    expect=("RDZ004.black-hole",),
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective", "--set", "COL001.deadline_seconds=6"),
)
