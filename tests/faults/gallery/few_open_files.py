"""A service that starts the job's processes on one host allows them few open files (D12)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].prefix = ["prlimit", "--nofile=256:256"]


FAULT = Fault(
    expect=("HST004.open-files",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
