"""The host of rank 0 loses its network, and with it the file server; the others report from the shared directory."""

from fault import Blame, Fault
from launch import Bed, Launcher


def when_reached(network, running):
    network[0].mount_tmpfs(network.folder / "shared", 1 << 20)
    network[0].mount_tmpfs(running.folder, 1 << 20)
    network[0].cut()


FAULT = Fault(
    expect=("RUN002.lost",),
    blame=Blame(ranks={0}),
    inject="pause 1",
    when_reached=when_reached,
    bed=Bed(ranks=(1, 1, 1), launcher=Launcher.ENV),
    options=("--shared-dir", "{shared}", "--stage", "launch,host,collective"),
    keeps={"rank0", "rank1", "rank2"},
    good={"h1", "h2"},
)
