"""srun does not hand down --cpus-per-task (SL7): all ranks of a host are bound to one core."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].prefix = ["taskset", "-c", "0"]


FAULT = Fault(
    expect=("HST001.one-core",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(2, 2), launcher=Launcher.ENV),
    options=("--stage", "launch,host"),
)
