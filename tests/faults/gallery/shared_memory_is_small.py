"""A container with docker's default /dev/shm of 64 MiB (N4): on hosts with GPUs NCCL would fail."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].mount_tmpfs("/dev/shm", 64 << 20)


FAULT = Fault(
    expect=("HST003.small",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host"),
)
