"""A rank's process is killed (SIGKILL) while the others wait for it in a collective."""

import signal

from fault import Blame, Fault
from launch import Bed, Launcher


def when_reached(network, running):
    running.in_fault(1).kill(signal.SIGKILL)


FAULT = Fault(
    expect=("RUN003.died",),
    blame=Blame(ranks={1}),
    inject="pause 1",
    when_reached=when_reached,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
