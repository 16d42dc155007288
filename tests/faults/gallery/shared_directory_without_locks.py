"""flock fails on one host (R11: NFS without a lock manager): torch's FileStore cannot work there."""

import sys

import without_flock
from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[1].prefix = [sys.executable, "-I", without_flock.__file__]


FAULT = Fault(
    expect=("RDZ006.locks",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--stage", "rendezvous", "--set", "RDZ001.deadline_seconds=6"),
)
