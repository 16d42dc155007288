"""One rank's loss becomes NaN; after the all-reduce of the gradients every rank has it."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("TRN001.nan",),
    blame=Blame(ranks={1}),
    inject="nan 1",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
