"""Two hosts with different versions of torch (R9): a difference, but no majority, so nobody can be blamed."""

from fault import NOBODY, Fault
from launch import Bed, Launcher


def before(network):
    network[1].variables["DDPDIAG_TEST_TORCH"] = "2.4.1"


FAULT = Fault(
    expect=("LCH003.torch",),
    blame=NOBODY,
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
    options=("--stage", "launch,host"),
)
