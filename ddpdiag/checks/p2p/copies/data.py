"""The GPUs of one host and the copies between them, put together from all that P2P002 tried there."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Card, cards_of
from ddpdiag.checks.hosts import Host, hosts_of
from ddpdiag.checks.matrix import Way
from ddpdiag.model.measurements import BothDirections, Copies, GpuCopies, PairCopies

D = TypeVar("D")


class View(Struct, frozen=True, kw_only=True):
    """What one rank of a host tried with the GPUs that it sees, by torch's index; `alone`: no other saw other ones.

    `cards` are what GPU003 knows of these GPUs, `takers` the ranks that train on them.
    """

    host: Host
    rank: int
    alone: bool
    gpus: Mapping[int, GpuCopies]
    pairs: Mapping[Way, PairCopies]
    both: tuple[BothDirections, ...]
    ring_bytes_per_s: float | None
    done: int
    jobs: int
    cards: Mapping[int, Card]
    takers: Mapping[int, tuple[int, ...]]

    def label(self, gpu: int) -> str:
        """Such as "GPU 2"; where ranks see GPUs of their own, "GPU 0 of rank 2"."""
        return f"GPU {gpu}" if self.alone else f"GPU {gpu} of rank {self.rank}"

    def full_label(self, gpu: int) -> str:
        """With UUID and PCI address."""
        own = self.gpus.get(gpu)
        known = [own.uuid or "", f"PCI {own.pci}" if own.pci else ""] if own else []
        shown = ", ".join(filter(None, known))
        return f"{self.label(gpu)}{f' ({shown})' if shown else ''}"

    def way_label(self, way: Way) -> str:
        """Such as "GPU 2 -> GPU 5"."""
        return " -> ".join(map(self.label, way))

    def uuids(self, gpus: Iterable[int]) -> tuple[str, ...]:
        """Of those that are known."""
        return tuple(own.uuid for gpu in gpus if (own := self.gpus.get(gpu)) is not None and own.uuid)

    def ranks_of(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The ranks that take these GPUs, as far as it is known."""
        return tuple(sorted({rank for gpu in gpus for rank in self.takers.get(gpu, ())}))


def views_of(seen: Seen[Copies]) -> list[View]:
    """One for each rank that tried something, in the order of hosts."""
    tried: dict[int, list[Copies]] = {}
    for row in seen.rows_so_far:
        tried.setdefault(row.place.rank, []).append(row.data)
    cards = {card.health.uuid: card for card in cards_of(seen.of(memory_errors.CHECK)) if card.health.uuid is not None}
    takers = _takers(seen)
    views = []
    for host in hosts_of(seen):
        own = {rank: tried[rank] for rank in host.ranks if rank in tried}
        shown = {frozenset(gpu.uuid for row in rows for gpu in row.gpus) for rows in own.values()}
        views += [_view(host, rank, rows, len(shown) == 1, cards, takers) for rank, rows in own.items()]
    return views


def _view(
    host: Host,
    rank: int,
    rows: Iterable[Copies],
    alone: bool,
    cards: Mapping[str, Card],
    takers: Mapping[str, tuple[int, ...]],
) -> View:
    """One after the other, since a trial goes on behind what the one before did not survive."""
    gpus: dict[int, GpuCopies] = {}
    whole = Copies()
    for row in rows:
        for own in row.gpus:
            gpus[own.index] = _more(gpus.get(own.index, own), own)
        whole = structs.replace(
            whole,
            pairs=(*whole.pairs, *row.pairs),
            both=(*whole.both, *row.both),
            ring_bytes_per_s=row.ring_bytes_per_s or whole.ring_bytes_per_s,
            done=max(whole.done, row.done),
            jobs=max(whole.jobs, row.jobs),
        )
    return View(
        host=host,
        rank=rank,
        alone=alone,
        gpus=gpus,
        pairs={(pair.source, pair.target): pair for pair in whole.pairs},
        both=whole.both,
        ring_bytes_per_s=whole.ring_bytes_per_s,
        done=whole.done,
        jobs=whole.jobs,
        cards={own.index: cards[own.uuid] for own in gpus.values() if own.uuid and own.uuid in cards},
        takers={own.index: takers[own.uuid] for own in gpus.values() if own.uuid and own.uuid in takers},
    )


def _more(known: GpuCopies, new: GpuCopies) -> GpuCopies:
    """The one that was measured."""
    return new if new.to_bytes_per_s is not None else known


def _takers(seen: Seen[D]) -> dict[str, tuple[int, ...]]:
    takers: dict[str, tuple[int, ...]] = {}
    for rank, row in seen.of(devices.CHECK).by_rank.items():
        if row.gpu is not None and row.gpu.uuid:
            takers[row.gpu.uuid] = (*takers.get(row.gpu.uuid, ()), rank)
    return takers


class Measured(NamedTuple):
    """One GPU's way to or from the host's memory."""

    view: View
    gpu: int
    bytes_per_s: float


def host_ways(views: Iterable[View]) -> Iterator[tuple[Host, bool, list[Measured]]]:
    """For each host and direction (True: to the GPU) what its GPUs reach, each once."""
    hosts: dict[tuple[int, ...], tuple[Host, list[View]]] = {}
    for view in views:
        hosts.setdefault(view.host.ranks, (view.host, []))[1].append(view)
    for host, own in hosts.values():
        for there in (True, False):
            ways: dict[object, Measured] = {}
            for view in own:
                for index, gpu in view.gpus.items():
                    rate = gpu.to_bytes_per_s if there else gpu.from_bytes_per_s
                    if rate is not None and rate > 0:
                        ways.setdefault(gpu.uuid or (view.rank, index), Measured(view, index, rate))
            yield host, there, list(ways.values())
