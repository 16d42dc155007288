"""A switch port goes down while a collective runs: the ranks behind it fall silent, and the others wait."""

from fault import Blame, Fault
from launch import Bed


def when_reached(network, running):
    network[1].cut()


FAULT = Fault(
    expect=("RUN002.lost",),
    blame=Blame(nodes={"h1"}),
    inject="pause 2",
    when_reached=when_reached,
    bed=Bed(ranks=(2, 2, 1)),
    options=("--stage", "collective"),
    keeps={"h1"},
    good={"h0", "h2"},
)
