"""RANK is exported in the job script, so two processes have rank 1 and none has rank 2 (R8, silent in torch)."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("LCH001.duplicate",),
    blame=Blame(ranks={1, 2}),  # 1 is there twice, and 2 is missing
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, on_rank={2: {"RANK": "1"}}),
    options=("--board-wait", "8"),
)
