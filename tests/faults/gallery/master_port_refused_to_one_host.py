"""The firewall of rank 0's host rejects connections of one host to MASTER_PORT (R4)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[0].block(port=29500, source=network[2], reject=True, new=True)


FAULT = Fault(
    expect=("RDZ005.refused",),
    blame=Blame(links={"h2 -> h0"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous", "--set", "RDZ001.deadline_seconds=8"),
)
