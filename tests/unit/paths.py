"""Hand-made ways between GPUs: a host with two PCIe switches of two GPUs each, and what differs there."""

from msgspec import structs
from seen import seen_of, together

from ddpdiag.checks.p2p.paths import CHECK, Data
from ddpdiag.probes.gpu.iommu import Bridge, PcieTopology, Slot
from ddpdiag.probes.gpu.nvml import Gpu
from ddpdiag.probes.gpu.paths import GpuPath, Level, Paths

REDIRECTS = 0x001D


def uuid_of(index, host=0):
    return f"GPU-{host}-{index}"


def pci_of(index):
    return f"0000:{index}b:00.0"


def port_of(index):
    """The switch's port above a GPU."""
    return f"0000:{index}a:00.0"


def root_of(index):
    """The root port above the switch of a GPU: one for every two GPUs."""
    return f"0000:{index // 2}0:01.0"


def way(source, target, **changes):
    level = Level.PIX if source // 2 == target // 2 else Level.SYS
    own = {"level": int(level), "nvlinks": 0, "read": 0, "write": 0, "nvlink": 5}
    return GpuPath(source=source, target=target, **(own | changes))


def around(count=4, *, acs=0, ports=(), roots=(), **facts):
    """Bridges above the GPUs; ACS redirects at the ports and roots of these GPUs. `acs` is what the others have."""
    slots = [
        Slot(pci=pci_of(index), bridges=(root_of(index), port_of(index)), grouped=True, domain="identity")
        for index in range(count)
    ]
    on = {port_of(index) for index in ports} | {root_of(index) for index in roots}
    addresses = dict.fromkeys(address for slot in slots for address in slot.bridges)
    bridges = [Bridge(address, REDIRECTS if address in on else acs) for address in addresses]
    own = {"virtual": False, "slots": tuple(slots), "bridges": tuple(bridges)}
    return PcieTopology(**(own | facts))


def translating(count=4, **facts):
    """The same with an IOMMU that translates."""
    own = around(count, **facts)
    return structs.replace(own, slots=tuple(structs.replace(slot, domain="DMA-FQ") for slot in own.slots))


def host_of(changes=None, *, host=0, count=4, name="NVIDIA L40S", surroundings=None, everywhere=None):
    """One host; `changes` maps a (source, target) to what differs on that way, `everywhere` holds for all of them."""
    differs = dict(changes or {})
    gpus = tuple(Gpu(index=index, uuid=uuid_of(index, host), pci=pci_of(index), name=name) for index in range(count))
    ways = tuple(
        way(source, target, **(everywhere or {}), **differs.get((source, target), {}))
        for source in range(count)
        for target in range(count)
        if source != target
    )
    return Data(paths=Paths(gpus=gpus, paths=ways), surroundings=surroundings or around(count))


def both(one, other, **changes):
    return {(one, other): changes, (other, one): changes}


def bound(count=4, host=0):
    """One answer a rank, each of which is shown its own GPU only."""
    whole = host_of(host=host, count=count)
    return [structs.replace(whole, paths=Paths(gpus=(structs.replace(gpu, index=0),))) for gpu in whole.paths.gpus]


def seen(*hosts, others=(), **world):
    """What P2P001 saw: one answer from each host of eight ranks; `others` is what other checks saw."""
    rows = {8 * number: data for number, data in enumerate(hosts)}
    return seen_of_rows(rows, others=others, **({"size": 8 * len(hosts)} | world))


def seen_of_rows(rows, *, others=(), **world):
    own = seen_of(CHECK, rows, **({"ranks_per_node": 8, "gpus": 4} | world))
    for other in others:
        own = together(own, other)
    return own


def judged(*hosts, **world):
    """The findings on these hosts."""
    return list(CHECK.judge(seen(*hosts, **world)))
