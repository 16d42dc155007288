"""One host cannot resolve the coordinator's name (R1): torch says only that the client socket timed out."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].resolve("h0", None)


FAULT = Fault(
    expect=("RUN001.absent",),
    blame=Blame(ranks={2}),
    exit_code=3,
    says={"rank2": "cannot be resolved"},
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--board-wait", "8"),
)
