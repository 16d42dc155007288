"""NCCL_HOSTID is left over on one host: NCCL takes neighbours for strangers, and never uses NVLink or shared memory."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].variables["NCCL_HOSTID"] = "old-experiment"


FAULT = Fault(
    expect=("LCH002.host-id",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.HAND),
    options=("--stage", "launch,host"),
)
