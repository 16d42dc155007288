"""One rank contributes wrong values to every all-reduce (N2: P2P behind an IOMMU); no error is raised anywhere."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("COL001.wrong",),
    blame=Blame(ranks={1}),
    inject="corrupt 1",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective"),
)
