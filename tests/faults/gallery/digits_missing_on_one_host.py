"""The data was not copied to one host (D9), which runs two ranks."""

from pathlib import Path

from fault import Blame, Fault
from launch import Bed, Launcher

import ddpdiag

DATA = Path(ddpdiag.__file__).parent / "data/mnist"


def before(network):
    network[0].mount_tmpfs(DATA, 1 << 20)


FAULT = Fault(
    expect=("TRN001.data",),
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(2, 1), launcher=Launcher.ENV),
    options=("--stage", "training"),
)
