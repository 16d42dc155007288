"""A host of three never starts its ranks (L11)."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN001.absent",),
    blame=Blame(ranks={2, 3}),
    exit_code=3,
    bed=Bed(ranks=(2, 2, 2), launcher=Launcher.NODE, absent={2, 3}),
    options=("--board-wait", "8", "--stage", "launch,host,rendezvous,collective"),
)
