"""The cable between two hosts is pulled while a collective runs: nobody can say whose end it was."""

from fault import Blame, Fault
from launch import Bed


def when_reached(network, running):
    network[1].cut()


FAULT = Fault(
    expect=("RUN002.link",),
    blame=Blame(links={"h0 -> h1", "h1 -> h0"}),
    inject="pause 2",
    when_reached=when_reached,
    bed=Bed(ranks=(2, 2)),
    options=("--stage", "collective"),
    keeps={"h1"},
    good=set(),
)
