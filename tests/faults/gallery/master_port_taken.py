"""Another job holds MASTER_PORT on rank 0's host (L8): "address already in use", from every rank."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[0].hold_port(29500, ["train.py", "--other-job"])


FAULT = Fault(
    expect=("RDZ005.taken",),
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--set", "RDZ001.deadline_seconds=6"),
)
