"""`import torch` never ends on one rank (a file server that does not answer, C1)."""

from fault import Blame, Fault
from launch import Bed, Launcher

FAULT = Fault(
    expect=("RUN003.hung",),
    blame=Blame(ranks={1}),
    inject="import 1",
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "launch,host,rendezvous,collective"),
    budget=40,  # a hang in the first trial with torch costs all of it
)
