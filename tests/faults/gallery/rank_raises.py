"""One rank raises an exception, the others wait for it in the collective (D4)."""

from fault import Blame, Fault
from launch import Bed

FAULT = Fault(
    expect=("RUN003.raised",),
    blame=Blame(ranks={1}),
    inject="raise 1",
    bed=Bed(ranks=(2, 1)),
)
