"""Hand-made GPUs: eight healthy ones on each host, and what differs on some of them."""

from msgspec import structs
from seen import seen_of

from ddpdiag.checks.gpu import memory_errors
from ddpdiag.probes.gpu.health import Clocks, GpuReading, Health, MemoryErrors
from ddpdiag.probes.gpu.links import Fabric, NvLink, PcieLink

LINKS = tuple(NvLink(number=number, up=True, errors=0) for number in range(18))


def uuid_of(index, host=0):
    return f"GPU-{host}-{index}"


def healthy(index, host=0, **changes):
    """An H100 on a board with NVSwitches."""
    own = {
        "uuid": uuid_of(index, host),
        "pci": f"0000:{index}b:00.0",
        "name": "NVIDIA H100",
        "memory": MemoryErrors(corrected=0, uncorrected=0, sram_uncorrected=0),
        "pcie": PcieLink(width=16, width_max=16, generation_max=5),
        "clocks": Clocks(events=1, celsius=34, power_limit_watts=700, default_power_limit_watts=700),
        "nvlinks": LINKS,
        "fabric": Fabric(state=3, status=0, health=1),
        "recovery_action": 0,
        "mig": False,
        "compute_mode": 0,
        "memory_used_bytes": 1 << 20,
        "processes": (),
    }
    return Health(index=index, **(own | changes))


def host_of(sick=None, *, host=0, count=8, driver="580.1"):
    """One host's GPUs; `sick` maps an index to what differs there."""
    changes = dict(sick or {})
    gpus = tuple(healthy(index, host, **changes.get(index, {})) for index in range(count))
    return GpuReading(driver=driver, gpus=gpus)


def seen(*looks, **world):
    """What GPU003 saw, one answer from each host of eight ranks."""
    rows = {8 * number: look for number, look in enumerate(looks)}
    return seen_of(memory_errors.CHECK, rows, **({"size": 8 * len(looks), "ranks_per_node": 8, "gpus": 8} | world))


def memory(**changes):
    return {"memory": structs.replace(healthy(0).memory, **changes)}


def pcie(**changes):
    return {"pcie": structs.replace(healthy(0).pcie, **changes)}


def clocks(**changes):
    return {"clocks": structs.replace(healthy(0).clocks, **changes)}


def fabric(**changes):
    return {"fabric": structs.replace(healthy(0).fabric, **changes)}


def links(down=(), **changes):
    """All links, some of them down, others with these errors."""
    return {
        "nvlinks": tuple(
            structs.replace(link, up=link.number not in down, **changes.get(f"link{link.number}", {})) for link in LINKS
        )
    }
