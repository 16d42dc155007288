"""Every host's firewall lets only a few ports through (R5): the cause is shared, and no host stands out."""

from fault import NOBODY, Fault
from launch import Bed, Launcher


def before(network):
    for host in network:
        host.block(port="32768:60999", new=True)


FAULT = Fault(
    expect=("RDZ004.dropped",),
    blame=NOBODY,
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
)
