"""Rank 0's host names itself 127.0.1.1 (G1, L10): the others reach it, and it offers them loopback."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    network[0].resolve("h0", "127.0.1.1")


FAULT = Fault(
    expect=("RDZ002.own", "RDZ002.loopback"),
    blame=Blame(nodes={"h0"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--stage", "rendezvous,collective", "--set", "RDZ001.deadline_seconds=6"),
)
