"""The GPUs that ranks measured for GPU012: what they reached, and with which others each may be compared."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import Card, cards_of
from ddpdiag.checks.gpu.clocks import HARMFUL
from ddpdiag.checks.hosts import hosts_of
from ddpdiag.model.measurements import Compute
from ddpdiag.probes.gpu.health import Health

MEMORY = "memory"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Seen in fewer looks it is a flicker: NVML also shows some for an instant when clocks change.
_LEAST_LOOKS = 2


class Data(Struct, frozen=True, kw_only=True):
    """What one rank measured: the GPU that it takes (or its CPU); all GPUs where a host is asked alone."""

    devices: tuple[Compute, ...] = ()


class Unit(NamedTuple):
    """One GPU, or the CPU of a rank, and its answers in order; `mine` are the pids of this run's ranks on its host.

    `card` is what GPU003 knows of the GPU; where it knows nothing, what torch says.
    """

    number: int
    rank: int
    card: Card
    runs: tuple[Compute, ...]
    mine: frozenset[int]
    shared: bool

    @property
    def label(self) -> str:
        """Such as "GPU 5 on n0 (GPU-3f1c..., PCI 0000:65:00.0)"."""
        return self.card.label if self.is_gpu else f"CPU of rank {self.rank} on {self.card.host.name}"

    @property
    def is_gpu(self) -> bool:
        """Is it no CPU?"""
        return self.runs[0].index is not None

    @property
    def is_slice(self) -> bool:
        """Is it a part of a GPU (MIG)?"""
        return bool(self.card.health.mig) or " MIG " in self.runs[0].device

    @property
    def model(self) -> tuple[str, int | None] | None:
        """What peers have in common; None of what has none: a CPU, whose cores others use as well, a slice of a GPU,
        a GPU that two ranks used at the same time."""
        alone = self.is_gpu and not self.is_slice and not self.shared
        return (self.runs[0].device, self.runs[0].processors) if alone else None

    @property
    def best(self) -> dict[str, float]:
        """The best of each kind in any run."""
        found: dict[str, float] = {}
        for at in range(len(self.runs)):
            found |= {name: max(rate, found.get(name, rate)) for name, rate in self.rates(at).items()}
        return found

    def rates(self, at: int) -> dict[str, float]:
        """The best of each kind in that run, "bf16", "fp32" and "memory": what disturbs only makes slower."""
        batches = batches_of(self.runs[at]) if at < len(self.runs) else {}
        return {name: max(values) for name, values in batches.items()}


def batches_of(run: Compute) -> dict[str, tuple[float, ...]]:
    """The rates of all batches of each kind."""
    found = {precision(gemm.dtype): gemm.flop_per_s for gemm in run.gemms}
    return {name: values for name, values in (found | {MEMORY: run.copy_bytes_per_s}).items() if values}


def precision(dtype: str) -> str:
    """Such as "bf16"."""
    return _PRECISIONS.get(dtype, dtype)


def units_of(seen: Seen[Data]) -> tuple[Unit, ...]:
    """All GPUs and CPUs that were measured, by rank."""
    runs: dict[tuple[int, int | None], list[Compute]] = defaultdict(list)
    for row in seen.rows:
        for device in row.data.devices:
            runs[row.place.rank, device.index].append(device)
    # By host and UUID, and by host and PCI address: a slice of a GPU has a UUID of its own, and its GPU's address.
    known: dict[tuple[str, str | None], Card] = {}
    for card in cards_of(seen.of(memory_errors.CHECK)):
        known |= {(card.host.name, name): card for name in (card.health.pci, card.health.uuid) if name}
    used = Counter(own[0].uuid for own in runs.values() if own[0].uuid)
    hosts = {rank: host for host in hosts_of(seen) for rank in host.ranks}
    pids: dict[str, set[int]] = defaultdict(set)
    for (rank, _), own in runs.items():
        pids[hosts[rank].name] |= {run.pid for run in own}
    units: list[Unit] = []
    for (rank, index), own in sorted(runs.items(), key=lambda run: (run[0][0], run[0][1] or 0)):
        first, host = own[0], hosts[rank]
        if asked := known.get((host.name, first.uuid)) or known.get((host.name, first.pci)):
            card = asked._replace(takers=tuple(sorted({*asked.takers, rank})))
        else:
            health = Health(index=index or 0, uuid=first.uuid, pci=first.pci, name=first.device)
            card = Card(host, health, first.driver, (rank,))
        computed = tuple(run for run in own if run.gemms) or (first,)
        units.append(Unit(len(units), rank, card, computed, frozenset(pids[host.name]), used[first.uuid or ""] > 1))
    return tuple(units)


def by_model(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """GPUs of one model with as many processors, in all hosts: what may be compared."""
    models: dict[object, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.model is not None:
            models[unit.model].append(unit)
    yield from models.values()


def others_use(unit: Unit, busy_share: float) -> str:
    """Who else used the GPU, such as "pid 4711"; empty for no other. Before its first product a free GPU is idle."""
    first = unit.runs[0]
    held = {process.pid for process in unit.card.health.processes or ()}
    # In a container NVML shows other pids, or none: only where this process is among them do they mean something.
    seen = {pid for run in unit.runs if run.pids and run.pid in run.pids for pid in run.pids}
    if pids := sorted((held | seen) - unit.mine):
        return f"pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
    busy = first.before.busy_share if first.before is not None else None
    return f"something that kept it busy ({busy:.0%}) before" if busy is not None and busy > busy_share else ""


def harmful_events(run: Compute) -> int:
    """Bits of harmful clock events that several looks during the products show."""
    times = {bit: sum(bool((look.events or 0) & bit) for look in run.during) for bit in HARMFUL}
    return sum(bit for bit, shown in times.items() if shown >= min(_LEAST_LOOKS, len(run.during)) > 0)


def load_of(run: Compute, name: str) -> float | None:
    """The median of a figure of its loads while it computed."""
    known = [value for look in run.during if (value := getattr(look, name)) is not None]
    return median(known) if known else None


class Nameplate(NamedTuple):
    """Products in half and in single precision, and reads and writes of memory, per second."""

    half_flop_per_s: float
    single_flop_per_s: float
    memory_bytes_per_s: float


def _plate(half_teraflops: float, single_teraflops: float, memory_gigabytes: float) -> Nameplate:
    return Nameplate(half_teraflops * 1e12, single_teraflops * 1e12, memory_gigabytes * 1e9)


# What makers say that a GPU reaches: products without sparsity, and the bandwidth of its memory. A GPU is found by its
# whole name, as CUDA has it: "GH200 480GB" is no "H200", and one board comes with several memories. A model that is not
# listed has no nameplate. Half precision is bf16, or fp16 where tensor cores know nothing else. Where a data sheet has
# the rate with sparsity, half of it is taken, as its footnote says.
_NAMEPLATES = {
    # NVIDIA Blackwell data sheet (HGX B200, GB200 NVL72: 4.5 and 5 PFLOPS of FP16 with sparsity for each GPU).
    "B200": _plate(2250, 75, 7700),
    "GB200": _plate(2500, 80, 8000),
    # NVIDIA H200 data sheet (1,979 and 1,671 TFLOPS with sparsity).
    "H200": _plate(989, 67, 4800),
    "H200 NVL": _plate(835, 60, 4800),
    # NVIDIA GH200 Grace Hopper Superchip data sheet: 96 GB of HBM3 (the name counts the processor's memory) or 144 GB
    # of HBM3e.
    "GH200 480GB": _plate(989, 67, 4000),
    "GH200 120GB": _plate(989, 67, 4000),
    "GH200 144G HBM3e": _plate(989, 67, 4900),
    # NVIDIA H100 data sheet (SXM 1,979, PCIe 1,513 TFLOPS with sparsity).
    "H100 80GB HBM3": _plate(989, 67, 3350),
    "H100 PCIe": _plate(756, 51, 2000),
    # NVIDIA A100 data sheet.
    "A100-SXM4-40GB": _plate(312, 19.5, 1555),
    "A100-PCIE-40GB": _plate(312, 19.5, 1555),
    "A100-SXM4-80GB": _plate(312, 19.5, 2039),
    "A100 80GB PCIe": _plate(312, 19.5, 1935),
    # NVIDIA A30 and A40 data sheets.
    "A30": _plate(165, 10.3, 933),
    "A40": _plate(149.7, 37.4, 696),
    # NVIDIA L4 data sheet (242 TFLOPS with sparsity) and L40S data sheet.
    "L4": _plate(121, 30.3, 300),
    "L40S": _plate(362, 91.6, 864),
    # NVIDIA V100 and T4 data sheets: fp16.
    "V100-SXM2-16GB": _plate(125, 15.7, 900),
    "V100-SXM2-32GB": _plate(125, 15.7, 900),
    "V100-PCIE-16GB": _plate(112, 14, 900),
    "V100-PCIE-32GB": _plate(112, 14, 900),
    "T4": _plate(65, 8.1, 320),
}


def nameplate_of(device: str) -> Nameplate | None:
    """The nameplate of the GPU of that name; drivers put its maker or its series in front."""
    return _NAMEPLATES.get(device.removeprefix("NVIDIA ").removeprefix("Tesla "))
