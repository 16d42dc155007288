"""A rank crashes in its first all-reduce (G9): the others only see "Connection closed by peer"."""

from fault import Blame, Fault
from launch import Bed

FAULT = Fault(
    expect=("RUN003.died",),
    blame=Blame(ranks={2}),
    inject="segv 2",
    bed=Bed(ranks=(2, 2)),
    options=("--stage", "launch,host,rendezvous,collective"),
)
