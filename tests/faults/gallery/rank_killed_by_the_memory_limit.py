"""A rank takes more memory than the job's control group allows, and the kernel kills it (C2)."""

from cgroups import limit_memory
from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    limit_memory(network, network[1], 2 << 30)


FAULT = Fault(
    expect=("RUN003.died",),
    blame=Blame(ranks={1}),
    inject="memory 1",
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous,collective", "--set", "COL001.deadline_seconds=40"),
)
