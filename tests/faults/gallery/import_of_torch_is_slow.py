"""`import torch` takes seconds longer on one rank (a busy file server, C1): a warning, and the job works."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].variables["DDPDIAG_TEST_IMPORT_SECONDS"] = "20"


FAULT = Fault(
    expect=("LCH003.slow-import",),
    severity="warning",
    exit_code=0,
    blame=Blame(ranks={1}),
    before=before,
    inject="slow-import 1",
    bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
    options=("--select", "LCH003,COL001", "--set", "LCH003.slow_import_seconds=18"),
)
