"""The firewall of rank 0's host drops MASTER_PORT (R3); ddpdiag's own ports are open."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[0].block(port=29500)


FAULT = Fault(
    expect=("RDZ005.dropped",),
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
)
