"""TORCH_DISTRIBUTED_DEBUG has a value on one host that `import torch` refuses (G11)."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].variables["TORCH_DISTRIBUTED_DEBUG"] = "VERBOSE"


FAULT = Fault(
    expect=("LCH002.debug-level",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous,collective"),
)
