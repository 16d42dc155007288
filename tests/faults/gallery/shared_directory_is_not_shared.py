"""The file server is not mounted on one host (R11): it writes into an empty directory of its own."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].mount_tmpfs(network.folder / "shared", 64 << 20)


FAULT = Fault(
    expect=("RDZ006.not-shared",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--set", "RDZ001.deadline_seconds=6"),
)
