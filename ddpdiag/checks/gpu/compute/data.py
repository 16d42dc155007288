"""The GPUs that ranks measured for GPU012: what they reached, and with which others each may be compared."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import Card, cards_of
from ddpdiag.checks.gpu.clocks import HARMFUL
from ddpdiag.checks.hosts import Host, hosts_of
from ddpdiag.model.measurements import Compute, GpuLoad
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
        for run in self.runs:
            found |= {name: max(rate, found.get(name, rate)) for name, rate in rates_of(run).items()}
        return found

    def rates(self, at: int) -> dict[str, float]:
        """The best of each kind in that run, "bf16", "fp32" and "memory": what disturbs only makes slower."""
        return rates_of(self.runs[at]) if at < len(self.runs) else {}


def rates_of(run: Compute) -> dict[str, float]:
    """The best rate of each kind."""
    return {name: max(values) for name, values in batches_of(run).items()}


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
    known = _by_name(cards_of(seen.of(memory_errors.CHECK)))
    used = Counter(own[0].uuid for own in runs.values() if own[0].uuid)
    pids: dict[str, set[int]] = defaultdict(set)
    for (rank, _), own in runs.items():
        pids[seen.world.node_of(rank)] |= {run.pid for run in own}
    hosts = {rank: host for host in hosts_of(seen) for rank in host.ranks}
    return tuple(
        Unit(
            number,
            rank,
            _card(rank, hosts[rank], own[0], known),
            tuple(run for run in own if run.gemms) or tuple(own[:1]),
            frozenset(pids[hosts[rank].name]),
            used[own[0].uuid or ""] > 1,
        )
        for number, ((rank, _), own) in enumerate(sorted(runs.items(), key=_place))
    )


def _place(measured: tuple[tuple[int, int | None], list[Compute]]) -> tuple[int, int]:
    (rank, index), _ = measured
    return rank, index or 0


def _by_name(cards: Sequence[Card]) -> dict[tuple[str, str | None], Card]:
    """By host and UUID, and by host and PCI address: a slice of a GPU has a UUID of its own, and its GPU's address."""
    return {(card.host.name, name): card for card in cards for name in (card.health.pci, card.health.uuid) if name}


def _card(rank: int, host: Host, run: Compute, known: Mapping[tuple[str, str | None], Card]) -> Card:
    if card := known.get((host.name, run.uuid)) or known.get((host.name, run.pci)):
        return card._replace(takers=tuple(sorted({*card.takers, rank})))
    health = Health(index=run.index or 0, uuid=run.uuid, pci=run.pci, name=run.device)
    return Card(host, health, run.driver, (rank,))


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
    return reduce(or_, (bit for bit in HARMFUL if _shown(run.during, bit)), 0)


def _shown(looks: Sequence[GpuLoad], bit: int) -> bool:
    return sum(bool((look.events or 0) & bit) for look in looks) >= min(_LEAST_LOOKS, len(looks)) > 0


def usual_load(units: Sequence[Unit], name: str) -> float | None:
    """The median over the units of a figure of their loads, such as "sm_hz", while they computed."""
    return _median(own for unit in units if (own := load_of(unit.runs[-1], name)) is not None)


def load_of(run: Compute, name: str) -> float | None:
    """The median of a figure of its loads while it computed."""
    return _median(value for look in run.during if (value := getattr(look, name)) is not None)


def _median(values: Iterator[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def ordered_rates(peers: Sequence[Unit], at: int) -> Mapping[str, Sequence[float]]:
    """The rates of each kind of all GPUs of a model in that run, in rising order."""
    rates: dict[str, list[float]] = defaultdict(list)
    for peer in peers:
        for name, rate in peer.rates(at).items():
            rates[name].append(rate)
    return {name: sorted(values) for name, values in rates.items()}
