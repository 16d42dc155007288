"""What one host sees in the place of the shared directory has no room left (C3)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    shared = network.folder / "shared"
    network[1].mount_tmpfs(shared, 1 << 20)
    network[1].call("sh", "-c", f"cat /dev/zero > {shared}/checkpoint.pt 2>/dev/null || true")


FAULT = Fault(
    expect=("RDZ006.full",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
)
