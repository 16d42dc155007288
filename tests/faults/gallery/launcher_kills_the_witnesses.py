"""What torchrun started for a rank is killed: within 0.1 s torchrun tells all others of that host to leave (L5)."""

import signal

from fault import Blame, Fault
from launch import Bed


def when_reached(network, running):
    running.launched(2).kill(signal.SIGKILL)


FAULT = Fault(
    expect=("RUN002.lost",),
    blame=Blame(ranks={2}),
    inject="pause 2",
    when_reached=when_reached,
    bed=Bed(ranks=(4,)),
    options=("--stage", "launch,host,rendezvous,collective"),
)
