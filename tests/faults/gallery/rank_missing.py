"""A rank was never started (R6): torch says "3/4 clients joined" and not which one is missing."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN001.absent",),
    blame=Blame(ranks={3}),
    exit_code=3,
    bed=Bed(ranks=(2, 2), launcher=Launcher.ENV, absent={3}),
    options=("--board-wait", "8"),
)
