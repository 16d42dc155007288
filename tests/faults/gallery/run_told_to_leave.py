"""The scheduler's time limit ends all processes while a rank hangs (SIGTERM): nobody here is to blame for that."""

import signal

from fault import NOBODY, Fault
from launch import Bed, Launcher


def when_reached(network, running):
    for rank in range(3):
        running.launched(rank).kill(signal.SIGTERM)


FAULT = Fault(
    expect=("RUN004.told",),
    blame=NOBODY,
    exit_code=143,
    inject="sleep 1",
    when_reached=when_reached,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
