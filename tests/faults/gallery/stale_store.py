"""A crashed job left its store in the shared directory (R10): the next one with that name talks to the dead."""

import sys

from fault import NOBODY, Fault
from launch import Bed, Launcher

STORE = "import torch.distributed as dist; s = dist.FileStore({!r}, 2); s.set('k', 'v'); import os; os._exit(0)"


def before(network):
    network[0].call(sys.executable, "-c", STORE.format(str(network.folder / "shared/store")))


FAULT = Fault(
    expect=("RDZ006.stale",),
    severity="warning",
    exit_code=0,
    blame=NOBODY,
    before=before,
    bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--stage", "rendezvous"),
)
