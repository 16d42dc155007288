"""A job that asked for too little memory on one host (C2)."""

from cgroups import limit_memory
from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    limit_memory(network, network[1], 800 << 20)


FAULT = Fault(
    expect=("HST002.short",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
    options=("--stage", "launch,host"),
)
