"""More is asked for than the budget allows: what was not seen is unknown, and nobody's fault."""

from fault import NOBODY, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN004.budget",),
    blame=NOBODY,
    exit_code=3,
    bed=Bed(ranks=(2,), launcher=Launcher.ALONE),
    options=("--set", "RDZ001.repeat=10000"),
    budget=25,
)
