"""Every host's firewall lets MASTER_PORT through and nothing else (R5): the rendezvous works, then gloo hangs."""

from fault import NOBODY, Fault
from launch import Bed, Launcher


def before(network):
    for host in network:
        host.block(port="1:29499", new=True)
        host.block(port="29501:65535", new=True)


FAULT = Fault(
    expect=("RDZ004.dropped",),
    blame=NOBODY,
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
)
