"""A rank stands inside of C code and holds the GIL: no signal handler of Python and no watchdog thread runs in it."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN003.hung",),
    blame=Blame(ranks={1}),
    inject="gil 1",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous,collective", "--set", "COL001.deadline_seconds=6"),
)
