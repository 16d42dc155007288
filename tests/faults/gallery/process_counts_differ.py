"""A host was started with another --nproc-per-node (L9): torchrun takes it without a word."""

from fault import Blame, Fault
from launch import Bed

FAULT = Fault(
    expect=("LCH001.uneven",),
    severity="warning",
    exit_code=0,
    blame=Blame(nodes={"h2"}),
    bed=Bed(ranks=(1, 1, 2)),
    options=("--stage", "launch,collective"),
)
