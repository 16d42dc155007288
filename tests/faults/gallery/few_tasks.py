"""A container allows few processes and threads (C4): the job dies of "Resource temporarily unavailable" later."""

from cgroups import limit_tasks
from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    limit_tasks(network, network[0], 100)


FAULT = Fault(
    expect=("HST004.processes",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
    options=("--stage", "launch,host"),
)
