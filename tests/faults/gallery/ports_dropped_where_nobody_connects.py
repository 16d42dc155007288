"""A firewall drops connections to the one host that connects to all others over gloo (R5): no harm yet, but a trap.

Of two ranks the one that offers the higher address connects, and the host that is closed here has the highest.
"""

from fault import Blame, Fault
from launch import Bed


def before(network):
    network[2].block(port="32768:60999", new=True)


FAULT = Fault(
    expect=("RDZ004.dropped",),
    blame=Blame(nodes={"h2"}),
    severity="warning",
    exit_code=0,
    before=before,
    bed=Bed(ranks=(1, 1, 1)),
    options=("--set", "RDZ001.deadline_seconds=8"),
    good={"h0", "h1", "h2"},
)
