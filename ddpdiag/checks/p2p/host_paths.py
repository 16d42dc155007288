"""The GPUs of each host and the paths between them, put together from what its ranks answered to P2P001."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import memory_errors
from ddpdiag.checks.gpu.cards import cards_of
from ddpdiag.checks.hosts import Host, answers_by_host, names_text
from ddpdiag.checks.launch import versions
from ddpdiag.checks.matrix import Link
from ddpdiag.nccl_rings import p2p_level
from ddpdiag.probes.gpu.iommu import Bridge, Surroundings
from ddpdiag.probes.gpu.nvml import Gpu
from ddpdiag.probes.gpu.paths import P2P, GpuPath, Level, Paths


class Data(Struct, frozen=True, kw_only=True):
    """The GPUs that NVML shows to a rank, and the PCI devices around them."""

    paths: Paths
    around: Surroundings = Surroundings()


class Pair(NamedTuple):
    """Two GPUs of a host, and the paths between them (None: not asked, since no rank is shown both)."""

    one: Gpu
    other: Gpu
    there: GpuPath | None
    back: GpuPath | None

    @property
    def known(self) -> tuple[GpuPath, ...]:
        """The paths that were asked."""
        return tuple(path for path in (self.there, self.back) if path is not None)

    @property
    def level(self) -> Level | None:
        """The place where their PCIe paths meet."""
        levels = {path.level for path in self.known}
        return next((level for level in Level if level in levels), None)

    @property
    def by_direction(self) -> dict[Link, P2P]:
        """NVML's status of each direction that it reports, by the numbers of the GPUs."""
        paths = ((self.one, self.other, self.there), (self.other, self.one, self.back))
        known = (((one.index, other.index), status_of(path)) for one, other, path in paths if path is not None)
        return {link: status for link, status in known if status is not None}

    @property
    def statuses(self) -> tuple[P2P, ...]:
        """NVML's statuses of the two directions, as far as it reports them."""
        return tuple(self.by_direction.values())

    @property
    def is_linked(self) -> bool:
        """Whether there are NVLinks between them, as far as is known."""
        return any(path.nvlinks for path in self.known)

    @property
    def is_unlinked(self) -> bool:
        """Whether there are certainly no NVLinks between them."""
        return bool(self.known) and all(path.nvlinks == 0 for path in self.known)

    @property
    def works(self) -> bool | None:
        """Whether NVML allows both directions; None if it reports nothing."""
        return all(status is P2P.OK for status in self.statuses) if self.statuses else None

    @property
    def is_asymmetric(self) -> bool:
        """Whether one direction is allowed and the other not."""
        return len(self.statuses) == 2 and (P2P.OK in self.statuses) and not self.works

    @property
    def is_switched_off(self) -> bool:
        """Whether it is switched off in the driver."""
        return P2P.DISABLED_BY_REGKEY in self.statuses

    @property
    def name(self) -> str:
        """Such as "GPU 1 <-> GPU 2"; of a pair with one closed direction that one: "GPU 2 -> GPU 1"."""
        if self.is_asymmetric:
            closed = next(link for link, status in self.by_direction.items() if status is not P2P.OK)
            return " -> ".join(f"GPU {index}" for index in closed)
        return f"GPU {self.one.index} <-> GPU {self.other.index}"

    @property
    def kind(self) -> tuple[object, ...]:
        """The facts that pairs must share to be compared: models, the place where their paths meet, NVLink or not."""
        return (tuple(sorted((self.one.name or "", self.other.name or ""))), self.level, self.is_linked)


class HostPaths(Struct, frozen=True, kw_only=True):
    """One host: the job's GPUs, each pair of them, and the PCI devices around; `errors` are those of NVML itself.

    `nccl` is the version that its ranks load (LCH003).
    """

    host: Host
    gpus: tuple[Gpu, ...]
    pairs: tuple[Pair, ...]
    around: Surroundings
    errors: tuple[str, ...] = ()
    nccl: str | None = None

    @property
    def unlinked(self) -> tuple[Pair, ...]:
        """Pairs without NVLinks: they go over PCIe."""
        return tuple(pair for pair in self.pairs if pair.is_unlinked)

    @property
    def through_memory(self) -> tuple[Pair, ...]:
        """Pairs that NCCL by itself connects through the host's memory, however fast their copies are."""
        most = p2p_level(self.around.processor, len(self.host.ranks), self.nccl)
        return tuple(
            pair for pair in self.unlinked if pair.level is not None and most is not None and pair.level > most
        )


def status_of(path: GpuPath) -> P2P | None:
    """The worse of reading and writing; of NVLinks that are there, that they are switched off counts too."""
    reported = [P2P(status) for status in (path.read, path.write) if status is not None]
    if path.nvlinks and path.nvlink == P2P.DISABLED_BY_REGKEY:
        reported.append(P2P.DISABLED_BY_REGKEY)
    known = [status for status in reported if status is not P2P.UNKNOWN]
    return next((status for status in known if status is not P2P.OK), P2P.OK) if known else None


@lru_cache(maxsize=1)
def host_paths(seen: Seen[Data]) -> tuple[HostPaths, ...]:
    """The hosts that answered, in order.

    GPUs that no rank may use belong to other jobs, and are left out; so are those that are cut into slices (MIG),
    between which there is no P2P.
    """
    ours: dict[tuple[int, ...], set[str]] = {}  # UUIDs by the host's ranks
    for card in cards_of(seen.of(memory_errors.CHECK)):
        own = ours.setdefault(card.host.ranks, set())
        if card.health.uuid is not None and not card.health.mig:
            own.add(card.health.uuid)
    loaded = {rank: data.nccl for rank, data in seen.of(versions.CHECK).by_rank.items()}
    return tuple(
        _host_paths(
            host, tuple(rows.values()), ours.get(host.ranks), next(filter(None, map(loaded.get, host.ranks)), None)
        )
        for host, rows in answers_by_host(seen)
    )


def _host_paths(host: Host, answers: Sequence[Data], ours: set[str] | None, nccl: str | None) -> HostPaths:
    """`ours` are the GPUs that count; None where GPU003 has no data of the host."""
    asked = [row.paths for row in answers]
    every = _numbered(gpu for paths in asked for gpu in paths.gpus if gpu.error is None)
    gpus = tuple(gpu for gpu in every if ours is None or gpu.uuid is None or gpu.uuid in ours)
    known: dict[tuple[str, str], GpuPath] = {}
    for paths in asked:
        keys = {gpu.index: _key(gpu) for gpu in paths.gpus}
        known |= {
            (keys[path.source], keys[path.target]): path
            for path in paths.paths
            if path.source in keys and path.target in keys
        }
    return HostPaths(
        host=host,
        gpus=gpus,
        pairs=tuple(
            Pair(one, other, known.get((_key(one), _key(other))), known.get((_key(other), _key(one))))
            for one, other in combinations(gpus, 2)
        ),
        around=answers[0].around,
        errors=tuple(paths.error for paths in asked if paths.error),
        nccl=nccl,
    )


def _numbered(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """Each GPU once, in bus order. Ranks with GPUs of their own all count from 0: then the order is the number."""
    own = sorted({_key(gpu): gpu for gpu in gpus}.values(), key=lambda gpu: (gpu.pci or "", gpu.index))
    if len({gpu.index for gpu in own}) == len(own):
        return tuple(own)
    return tuple(structs.replace(gpu, index=number) for number, gpu in enumerate(own))


def _key(gpu: Gpu) -> str:
    return gpu.uuid or gpu.pci or f"index {gpu.index}"


def label(gpu: Gpu) -> str:
    """Such as "GPU 5 (GPU-3f1c..., PCI 0000:65:00.0)"."""
    known = ", ".join(filter(None, [gpu.uuid, f"PCI {gpu.pci}" if gpu.pci else None]))
    return f"GPU {gpu.index}{f' ({known})' if known else ''}"


def gpus_of(pairs: Iterable[Pair]) -> tuple[Gpu, ...]:
    """The GPUs of some pairs, each once, by number."""
    return tuple(
        sorted({gpu.index: gpu for pair in pairs for gpu in (pair.one, pair.other)}.values(), key=lambda gpu: gpu.index)
    )


def pairs_text(pairs: Sequence[Pair]) -> str:
    """Such as "GPU 0 <-> GPU 1, GPU 0 <-> GPU 2"."""
    return names_text([pair.name for pair in pairs])


def words(status: P2P) -> str:
    """A status in words: "disabled by a registry key"."""
    return status.name.replace("_", " ").lower().replace("gpu", "GPU").replace("regkey", "a registry key")


@lru_cache(maxsize=1)
def odd_pairs(seen: Seen[Data]) -> frozenset[Pair]:
    """Pairs that are not allowed, although more than half of those of their kind are.

    Of a kind are pairs of the same models that are connected in the same way, on whatever host. One whose directions
    differ is no vote.
    """
    kinds = defaultdict(list)
    for pair in (pair for paths in host_paths(seen) for pair in paths.pairs):
        if pair.works is not None and not pair.is_asymmetric:
            kinds[pair.kind].append(pair)
    return frozenset(
        pair
        for pairs in kinds.values()
        if 2 * sum(bool(pair.works) for pair in pairs) > len(pairs)
        for pair in pairs
        if not pair.works
    )


def redirecting(paths: HostPaths, pairs: Iterable[Pair]) -> dict[Bridge, list[Pair]]:
    """Bridges between these GPUs on which ACS redirects, with the pairs that each concerns."""
    found: dict[Bridge, list[Pair]] = {}
    for pair in pairs:
        for bridge in paths.around.between(pair.one.pci, pair.other.pci):
            if bridge.redirects:
                found.setdefault(bridge, []).append(pair)
    return found


def hides_acs(paths: HostPaths, pairs: Iterable[Pair]) -> bool:
    """Whether there is a bridge between these GPUs whose ACS could not be read."""
    return any(bridge.acs is None for pair in pairs for bridge in paths.around.between(pair.one.pci, pair.other.pci))


def addresses(bridges: Iterable[Bridge]) -> str:
    """Such as "0000:17:01.0, 0000:17:03.0"."""
    return names_text([bridge.address for bridge in bridges])
