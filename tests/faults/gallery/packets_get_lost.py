"""One host loses five packets of a hundred (G7): a bad cable, a dying port."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].lose(0.05)


FAULT = Fault(
    expect=("RDZ004.loss", "RDZ004.slow"),
    blame=Blame(nodes={"h1"}),
    severity="warning",
    exit_code=0,
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous"),
)
