"""One host's cable came up at a fraction of its rate (G5, S7); an all-reduce is as slow for everybody."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].slow("20mbit")
    network[1].slow("20mbit", incoming=True)


FAULT = Fault(
    expect=("RDZ004.slow",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective"),
    good={"h0", "h2"},
)
