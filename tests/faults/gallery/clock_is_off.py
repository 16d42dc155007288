"""One host's clock is four minutes off (R16): nobody fails, and the order of log lines is a lie."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].variables["DDPDIAG_TEST_CLOCK"] = "240"


FAULT = Fault(
    expect=("RDZ007.skew", "RDZ007.clock", "RDZ007.off"),
    blame=Blame(nodes={"h2"}),
    severity="warning",
    exit_code=0,
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=(),
)
