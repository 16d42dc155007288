"""Two ranks of five, on different hosts, never enter the collective: both must be named."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN003.hung",),
    blame=Blame(ranks={1, 4}),
    inject="sleep 1,sleep 4",
    bed=Bed(ranks=(2, 2, 1), launcher=Launcher.ENV),
    options=("--select", "LCH003,COL001", "--set", "COL001.deadline_seconds=6"),
)
