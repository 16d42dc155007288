"""Every host's name means its docker0, which has the same address everywhere (G4): peers connect to themselves."""

from fault import Blame, Fault
from launch import Bed, Launcher
from network import NET


def before(network):
    for host in network:
        host.add_bridge("docker0", "172.17.0.1/16")
        host.resolve(host.name, "172.17.0.1")


FAULT = Fault(
    expect=("RDZ003.shared",),
    blame=Blame(nodes={"h0", "h1", "h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, coordinator=f"{NET}.1"),
    options=("--set", "RDZ001.deadline_seconds=8", "--set", "COL001.deadline_seconds=8"),
)
