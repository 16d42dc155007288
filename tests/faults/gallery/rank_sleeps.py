"""A rank never enters the collective (it waits for a file server, a lock, a download); the others wait for it (D10)."""

from fault import Blame, Fault
from launch import Bed

FAULT = Fault(
    expect=("RUN003.hung",),
    blame=Blame(ranks={3}),
    inject="sleep 3",
    bed=Bed(ranks=(2, 2)),
    options=("--stage", "collective", "--set", "COL001.deadline_seconds=6"),
)
