"""Rank 0's process is killed, but all records go to a shared directory: the lowest living rank reports."""

import signal

from fault import Blame, Fault
from launch import Bed, Launcher


def when_reached(network, running):
    running.launched(0).kill(signal.SIGKILL)


FAULT = Fault(
    expect=("RUN002.lost",),
    blame=Blame(ranks={0}),
    inject="pause 1",
    when_reached=when_reached,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--stage", "launch,host,collective"),
    keeps={"rank0", "rank1", "rank2"},
    good={"h1", "h2"},
)
