"""Which GPUs of its host a job may use, and which one each rank takes.

torch (GPU002) says it by UUID. Where it does not, CUDA_VISIBLE_DEVICES as GPU001 recorded it is read as CUDA does:
indices, UUIDs and their abbreviations, slices of a GPU. An index is taken for a place in NVML's order, that of the PCI
bus, only where all GPUs of the rank are of one model, since CUDA counts the fastest first.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.gpu.present import check as present
from ddpdiag.checks.gpu.present.data import Data
from ddpdiag.checks.hosts import Host
from ddpdiag.checks.world import World
from ddpdiag.probes.gpu.health import Health
from ddpdiag.probes.gpu.nvml import Gpu
from ddpdiag.probes.gpu.visibility import ProcGpu, device_index, gpus_named

D = TypeVar("D")


@dataclass(frozen=True)
class Shown:
    """What GPU001 and GPU002 know of it, by rank."""

    world: World
    enumerated: Mapping[int, Data]
    torch: Mapping[int, devices.Data]

    def to(self, host: Host, found: Sequence[Health]) -> frozenset[str] | None:
        """UUIDs of those of the host's GPUs that its ranks may use; None if that is not certain.

        CUDA may leave out a GPU because it is sick, so torch is believed only where it shows as many as it should.
        """
        known = frozenset(health.uuid for health in found if health.uuid)
        counts = {rank: self.world.arrivals[rank].gpus for rank in host.ranks}
        if all(rank in self.torch and len(self.torch[rank].gpus) == count for rank, count in counts.items()):
            uuids = frozenset(gpu.uuid or "" for rank in host.ranks for gpu in self.torch[rank].gpus)
            # A slice of a GPU has a UUID of its own.
            if uuids and uuids <= known:
                return uuids
        if max(counts.values(), default=0) >= len(found):
            return known
        named = [visible_uuids(self.enumerated[rank]) for rank in host.ranks if rank in self.enumerated]
        told = [frozenset(uuids) for uuids in named if uuids is not None]
        return frozenset[str]().union(*told) if len(told) == len(host.ranks) else None

    def takers(self) -> dict[str, tuple[int, ...]]:
        """The ranks that take each GPU, by UUID."""
        taken = {rank: uuid for rank, row in self.enumerated.items() if (uuid := self._named(rank, row))}
        known = {gpu.uuid for row in self.enumerated.values() for gpu in row.nvml.gpus}
        for rank, row in self.torch.items():
            if row.gpu is not None and row.gpu.uuid and (row.gpu.uuid in known or rank not in taken):
                taken[rank] = row.gpu.uuid
        ranks: dict[str, tuple[int, ...]] = defaultdict(tuple)
        for rank in sorted(taken):
            ranks[taken[rank]] += (rank,)
        return ranks

    def _named(self, rank: int, row: Data) -> str | None:
        """The GPU that the rank takes by its variable."""
        uuids = visible_uuids(row) or ()
        chosen = device_index(self.world.places[rank].local_rank, len(uuids))
        certain = row.cuda_visible_devices is not None or len(_models(row.nvml.gpus)) == 1
        return uuids[chosen] if chosen is not None and certain else None


def shown_of(seen: Seen[D]) -> Shown:
    """What the two checks know in this run."""
    return Shown(seen.world, seen.of(present.CHECK).by_rank, seen.of(devices.CHECK).by_rank)


def visible_uuids(row: Data) -> tuple[str, ...] | None:
    """UUIDs of the GPUs that the variable shows to this rank, in its order; None where that cannot be told."""
    gpus, value = row.nvml.gpus, row.cuda_visible_devices
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    # CUDA leaves out a GPU that cannot be opened, and counts on.
    if not uuids or len(uuids) < len(gpus):
        return None
    if value is None:
        return tuple(uuids)
    if value.startswith("MIG-"):
        return _parent(value.partition(",")[0], gpus)
    named = gpus_named(value, [ProcGpu(gpu.pci or "", gpu.name, gpu.uuid) for gpu in gpus])
    if any(name.isdecimal() for name in named) and len(_models(gpus)) > 1:
        return None
    return tuple(uuids[int(name)] if name.isdecimal() else name for name in named)


def _models(gpus: Sequence[Gpu]) -> set[str | None]:
    return {gpu.name for gpu in gpus}


def _parent(entry: str, gpus: Sequence[Gpu]) -> tuple[str, ...] | None:
    """The GPU of a slice: named in its older form ("MIG-GPU-<uuid>/<instance>/<part>"), or the only one that is cut."""
    older = entry.removeprefix("MIG-").partition("/")[0]
    fitting = [gpu.uuid or "" for gpu in gpus if gpu.uuid == older or (not older.startswith("GPU-") and gpu.mig)]
    return (fitting[0],) if len(fitting) == 1 else None
