"""A rank leaves with exit code 0 in the middle of a collective, as a script that calls sys.exit() too early."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN003.died",),
    blame=Blame(ranks={1}),
    inject="exit 1",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
