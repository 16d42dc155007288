"""A damaged copy of the data on one host."""

from pathlib import Path

from fault import Blame, Fault
from launch import Bed, Launcher

import ddpdiag

DATA = Path(ddpdiag.__file__).parent / "data/mnist"


def before(network):
    original = next(DATA.glob("train-images*"))
    damaged = bytearray(original.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = bytes(64)
    copy = network.folder / original.name
    copy.write_bytes(damaged)
    network[1].bind(copy, original)


FAULT = Fault(
    expect=("TRN001.data",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
