"""Of three hosts one cannot open connections to one other; the way back works (R5)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].block(port="32768:60999", source=network[2], new=True)


FAULT = Fault(
    expect=("RDZ004.dropped",),
    blame=Blame(links={"h2 -> h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous", "--set", "RDZ001.deadline_seconds=8"),
)
