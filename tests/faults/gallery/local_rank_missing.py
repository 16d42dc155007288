"""RANK and WORLD_SIZE are exported, LOCAL_RANK is not (L1): scripts that read it fail with a KeyError."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("LCH001.no-local-rank",),
    blame=Blame(ranks={0, 1, 2, 3}),
    severity="warning",
    exit_code=0,
    bed=Bed(ranks=(2, 2), launcher=Launcher.ENV, on_rank={rank: {"LOCAL_RANK": None} for rank in range(4)}),
    options=("--stage", "launch,host"),
)
