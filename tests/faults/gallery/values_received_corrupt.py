"""What one rank receives is wrong (a bad cable, memory errors): its own results differ, and no error is raised."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("COL001.wrong",),
    blame=Blame(ranks={2}),
    inject="corrupt-received 2",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,collective"),
)
