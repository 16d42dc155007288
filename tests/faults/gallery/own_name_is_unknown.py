"""A host cannot resolve its own name (G2): gloo falls back to loopback, with a warning that nobody reads."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].resolve("h1", None)


FAULT = Fault(
    expect=("RDZ002.own",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
)
