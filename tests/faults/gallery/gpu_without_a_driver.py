"""A host has a GPU on its PCI bus and no driver for it (N13): a job would take its CPUs, or fail."""

from fault import Blame, Fault
from launch import Bed, Launcher


def before(network):
    device = network.folder / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    network[1].variables["DDPDIAG_SYSFS"] = str(network.folder / "sys")


FAULT = Fault(
    expect=("GPU001.fewer",),
    blame=Blame(nodes={"h1"}),
    before=before,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
)
