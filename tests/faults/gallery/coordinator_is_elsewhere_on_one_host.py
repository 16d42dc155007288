"""An old line in /etc/hosts of one host gives the coordinator the address of another machine (SL4)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[2].resolve("h0", network[1].address)


FAULT = Fault(
    expect=("RUN001.absent",),
    blame=Blame(ranks={2}),
    exit_code=3,
    says={"rank2": "refused"},
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--board-wait", "8", "--stage", "rendezvous,collective"),
)
