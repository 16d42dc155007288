"""A start-up file of one host sets an NCCL variable that the others do not have (N22)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].variables["NCCL_ALGO"] = "Ring"


FAULT = Fault(
    expect=("LCH002.variable",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
