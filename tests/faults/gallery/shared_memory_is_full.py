"""Files of a killed job fill /dev/shm of one host (N4): who touches a new page there dies of SIGBUS."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[0].mount_tmpfs("/dev/shm", 16 << 20)
    network[0].call("sh", "-c", "cat /dev/zero > /dev/shm/nccl-old 2>/dev/null || true")


FAULT = Fault(
    expect=("HST003.unusable",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
    options=("--stage", "launch,host"),
)
