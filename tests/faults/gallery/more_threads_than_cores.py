"""OMP_NUM_THREADS of one host is far more than it has cores (S4): ranks fight for them in every step."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].variables["OMP_NUM_THREADS"] = "64"


FAULT = Fault(
    expect=("HST001.oversubscribed",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
    options=("--stage", "launch,host"),
)
