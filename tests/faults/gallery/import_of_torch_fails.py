"""One host lacks a library that torch needs: its rank cannot even begin, and the others wait for it."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN003.raised", "RUN003.died"),
    blame=Blame(ranks={1}),
    inject="broken-import 1",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
