"""Two ranks of one host have the same LOCAL_RANK, so they would take the same GPU (N5)."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("LCH001.local-rank",),
    blame=Blame(ranks={2, 3}),
    bed=Bed(ranks=(2, 2), launcher=Launcher.ENV, on_rank={3: {"LOCAL_RANK": "0"}}),
    options=("--stage", "launch,host"),
)
