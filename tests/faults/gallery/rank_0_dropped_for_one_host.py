"""A firewall drops all that one of three hosts sends to rank 0's (R3): that host itself says what it met."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[0].block(source=network[2])


FAULT = Fault(
    expect=("RUN001.absent",),
    blame=Blame(ranks={2}),
    exit_code=3,
    says={"rank2": "a firewall drops"},
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--board-wait", "8"),
)
