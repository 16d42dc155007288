"""A rank's process is stopped (SIGSTOP: a debugger, a suspended job, G10); nobody's error text names it."""

import signal

from fault import Blame, Fault
from launch import Bed


def when_reached(network, running):
    running.in_fault(1).kill(signal.SIGSTOP)


FAULT = Fault(
    expect=("RUN003.hung",),
    blame=Blame(ranks={1}),
    inject="pause 1",
    when_reached=when_reached,
    bed=Bed(ranks=(1, 2)),
    options=("--stage", "launch,host,rendezvous,collective", "--set", "COL001.deadline_seconds=6"),
)
