"""What one host sends is slow, what it receives is not (a bad transceiver, a wrong duplex)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].slow("100mbit")


FAULT = Fault(
    expect=("RDZ004.slow",),
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous"),
)
