"""One host has another torch than the rest (R9): an environment that was not updated everywhere."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].variables["DDPDIAG_TEST_TORCH"] = "2.4.1"


FAULT = Fault(
    expect=("LCH003.torch",),
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
