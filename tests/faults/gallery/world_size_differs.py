"""One rank was started with another WORLD_SIZE (R7): torch waits for a rank that does not exist."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("LCH001.world-size",),
    blame=Blame(ranks={2}),
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV, on_rank={2: {"WORLD_SIZE": "5"}}),
    options=("--board-wait", "8"),
)
