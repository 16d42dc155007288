"""Two hosts, and a slow link between them: nobody can tell which side is at fault."""

from fault import Blame, Fault
from launch import Bed


def before(network):
    network[1].slow("100mbit")
    network[1].slow("100mbit", incoming=True)


FAULT = Fault(
    expect=("RDZ004.slow",),
    blame=Blame(links={"h0 -> h1", "h1 -> h0"}),
    severity="warning",
    exit_code=0,
    before=before,
    bed=Bed(ranks=(1, 1)),
    options=("--stage", "launch,host,rendezvous"),
)
