"""A firewall drops the ports that ddpdiag itself would like to use, and none that a job needs: no fault at all."""

from fault import NOBODY, Fault
from launch import Bed, Launcher


def before(network):
    network[0].block(port="30000:32767", source=network[2])


FAULT = Fault(
    expect=(),
    blame=NOBODY,
    exit_code=0,
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--board-wait", "8"),
)
