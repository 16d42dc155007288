"""What a process says of itself and its host when a run begins."""

import os
import secrets

from ddpdiag.model import Arrival, Place
from ddpdiag.probes.gpus import pci_gpus, visible_gpus
from ddpdiag.probes.procfs import boot_id, proc_root
from ddpdiag.probes.sysfs import sys_root


def own_arrival(place: Place) -> Arrival:
    """This process's arrival, as far as it knows itself; whoever leads the run adds when it came, and from where."""
    return Arrival(
        place=place,
        host_id=boot_id(),
        pid=os.getpid(),
        address="",
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        pci_gpus=pci_gpus(sys_root(os.environ)),
        nonce=secrets.token_hex(4),
        cpus=f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
    )
