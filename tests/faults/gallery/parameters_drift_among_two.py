"""Two ranks end with different parameters: nobody can say whose are right."""

from fault import NOBODY, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("TRN001.diverged",),
    blame=NOBODY,
    inject="noise 1",
    bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
    options=("--stage", "training"),
)
