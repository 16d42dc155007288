"""One host is slow towards one other (S7: a bad inter-switch link); both are fast with the third."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].slow("20mbit", towards=network[2])


FAULT = Fault(
    expect=("RDZ004.slow",),
    blame=Blame(links={"h1 -> h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=(
        "--stage",
        "rendezvous",
    ),
)
