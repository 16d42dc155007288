"""One rank's parameters drift away from the others' (a GPU that computes wrong, H9); the loss falls all the same."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("TRN001.diverged",),
    blame=Blame(ranks={2}),
    inject="noise 2",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
