"""Rank 0's process is killed: it alone could report, so each of the others says that it is gone, and where its own
record lies."""

import signal

from fault import NOBODY, Fault
from launch import Bed, Launcher


def when_reached(network, running):
    running.launched(0).kill(signal.SIGKILL)


FAULT = Fault(
    expect=(),
    blame=NOBODY,
    says={"rank1": "lost rank 0", "rank2": "lost rank 0"},
    reports=False,
    inject="pause 1",
    when_reached=when_reached,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,collective"),
    keeps={"rank0", "rank1", "rank2"},
)
