"""A rank runs in a loop without end, where the others wait for it."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN003.hung",),
    blame=Blame(ranks={0}),
    inject="spin 0",
    bed=Bed(ranks=(3,), launcher=Launcher.ALONE),
    options=("--select", "LCH003,COL001", "--set", "COL001.deadline_seconds=6"),
)
