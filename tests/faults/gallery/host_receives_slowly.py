"""A policer slows down what one host receives; what it sends is fast (S7)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].slow("20mbit", incoming=True)


FAULT = Fault(
    expect=("RDZ004.slow",),
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=(
        "--stage",
        "rendezvous",
    ),
)
