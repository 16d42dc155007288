"""The shared directory is mounted read-only on one host (R11): torch tries to open the file for five minutes."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    shared = network.folder / "shared"
    network[2].bind(shared, shared, read_only=True)


FAULT = Fault(
    expect=("RDZ006.read-only",),
    blame=Blame(nodes={"h2"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
)
