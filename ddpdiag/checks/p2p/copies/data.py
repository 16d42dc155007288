"""The GPUs of one host and the copies between them, put together from all that P2P002 tried there."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Card, cards_of, smi_id
from ddpdiag.checks.hosts import Host, hosts_of
from ddpdiag.checks.matrix import Link
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.host_paths import host_paths
from ddpdiag.model import Trial
from ddpdiag.model.measurements import Copies, GpuCopies, PairCopies

_GPU = re.compile(r"GPU (\d+)")
# The parameter of a trial, with the rank behind it, that lists the pairs and GPUs to be measured once more.
AGAIN = "again."


class RankCopies(Struct, frozen=True, kw_only=True):
    """What one rank of a host tried with the GPUs that it sees, by torch's index; `alone`: no other saw other ones.

    `cards` are what GPU003 knows of these GPUs, `takers` the ranks that train on them. `numbers` are those of NVML,
    which counts otherwise than torch where CUDA_VISIBLE_DEVICES is set. `again` and `again_gpus` are pairs and links to
    the host that were far below what is expected, measured a second time.
    """

    host: Host
    rank: int
    alone: bool
    gpus: Mapping[int, GpuCopies]
    pairs: Mapping[Link, PairCopies]
    done: int
    jobs: int
    refused: tuple[Link, ...]
    cards: Mapping[int, Card]
    takers: Mapping[int, Sequence[int]]
    numbers: Mapping[int, int]
    again: Mapping[Link, PairCopies] = {}
    again_gpus: Mapping[int, GpuCopies] = {}

    @property
    def in_order(self) -> list[int]:
        """The GPUs by NVML's numbers, as far as these are known."""
        return sorted(self.gpus, key=lambda gpu: (self.numbers.get(gpu, len(self.gpus)), gpu))

    def label(self, gpu: int) -> str:
        """Such as "GPU 2", by NVML; where its number is not known, "GPU 0 of rank 2" if ranks see GPUs of their own."""
        if gpu in self.numbers:
            return f"GPU {self.numbers[gpu]}"
        name = f"cuda:{gpu}" if self.numbers else f"GPU {gpu}"
        return name if self.alone else f"{name} of rank {self.rank}"

    def renumbered(self, step: str) -> str:
        """A step of the measurement, which knows of torch's numbers only, with NVML's."""
        return _GPU.sub(lambda found: self.label(int(found[1])), step) if self.numbers else step

    def full_label(self, gpu: int) -> str:
        """With UUID and PCI address."""
        own = self.gpus.get(gpu)
        known = [own.uuid or "", f"PCI {own.pci}" if own.pci else ""] if own else []
        shown = ", ".join(filter(None, known))
        return f"{self.label(gpu)}{f' ({shown})' if shown else ''}"

    def smi_id(self, gpu: int) -> str:
        """The name of the GPU in a command."""
        own = self.gpus.get(gpu)
        return smi_id(own.uuid, own.pci) if own else smi_id(None)

    def link_label(self, link: Link) -> str:
        """Such as "GPU 2 -> GPU 5"."""
        return " -> ".join(map(self.label, link))

    def uuids(self, gpus: Iterable[int]) -> tuple[str, ...]:
        """Of those that are known."""
        return tuple(own.uuid for gpu in gpus if (own := self.gpus.get(gpu)) is not None and own.uuid)

    def ranks_of(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The ranks that take these GPUs, as far as it is known."""
        return tuple(sorted({rank for gpu in gpus for rank in self.takers.get(gpu, ())}))


def copies_by_rank(seen: Seen[Copies]) -> list[RankCopies]:
    """One for each rank that tried something, in the order of hosts."""
    tried = defaultdict(list)
    again: dict[int, list[Copies]] = defaultdict(list)
    for row in seen.rows_so_far:
        if is_repetition(row.trial):
            again[row.place.rank].append(row.data)
        else:
            tried[row.place.rank].append(row.data)
    cards = {card.health.uuid: card for card in cards_of(seen.of(memory_errors.CHECK)) if card.health.uuid is not None}
    takers = defaultdict(list)
    for rank, answer in seen.of(devices.CHECK).by_rank.items():
        if answer.gpu is not None and answer.gpu.uuid:
            takers[answer.gpu.uuid].append(rank)
    all_copies = []
    numbered = _numbers(seen)
    for host in hosts_of(seen):
        own = {rank: tried[rank] for rank in host.ranks if rank in tried}
        shown = {frozenset(gpu.uuid for row in rows for gpu in row.gpus) for rows in own.values()}
        numbers = numbered.get(host.ranks, {})
        for rank, rows in own.items():
            all_copies.append(_rank_copies(host, rank, rows, again[rank], len(shown) == 1, cards, takers, numbers))
    return all_copies


def _numbers(seen: Seen[Copies]) -> dict[tuple[int, ...], dict[str, int]]:
    """The numbers of GPUs by UUID, for the ranks of each host: those of P2P001, else NVML's in GPU003."""
    numbers: dict[tuple[int, ...], dict[str, int]] = {}
    for card in cards_of(seen.of(memory_errors.CHECK)):
        if card.health.uuid is not None:
            numbers.setdefault(card.host.ranks, {})[card.health.uuid] = card.health.index
    # Where each rank is shown one GPU, all of them are number 0.
    unique = {ranks: own for ranks, own in numbers.items() if len(set(own.values())) == len(own)}
    known = host_paths(seen.of(paths.CHECK))
    return unique | {own.host.ranks: {gpu.uuid: gpu.index for gpu in own.gpus if gpu.uuid} for own in known if own.gpus}


def is_repetition(trial: Trial) -> bool:
    """Were pairs measured a second time in it?"""
    return any(name.startswith(AGAIN) for name in trial.params)


def _rank_copies(
    host: Host,
    rank: int,
    rows: Sequence[Copies],
    again: Sequence[Copies],
    alone: bool,
    cards: Mapping[str, Card],
    takers: Mapping[str, Sequence[int]],
    numbers: Mapping[str, int],
) -> RankCopies:
    """One after the other, since a trial goes on behind what the one before did not survive."""
    gpus: dict[int, GpuCopies] = {}
    for own in (own for row in rows for own in row.gpus):
        if own.index not in gpus or own.to_bytes_per_s is not None:
            gpus[own.index] = own
    pairs = {(pair.source, pair.target): pair for row in rows for pair in row.pairs}
    second = {(pair.source, pair.target): pair for row in again for pair in row.pairs}
    for link in second.keys() & pairs.keys():  # the first rates, and the wrong words of either
        one, other = pairs[link], second[link]
        through_host = max(one.wrong_through_host, other.wrong_through_host)
        pairs[link] = structs.replace(one, wrong=max(one.wrong, other.wrong), wrong_through_host=through_host)
    return RankCopies(
        host=host,
        rank=rank,
        alone=alone,
        gpus=gpus,
        pairs=pairs,
        done=max(row.done for row in rows),
        jobs=max(row.jobs for row in rows),
        refused=tuple(dict.fromkeys(link for row in rows for link in row.refused)),
        cards={own.index: cards[own.uuid] for own in gpus.values() if own.uuid and own.uuid in cards},
        takers={own.index: takers[own.uuid] for own in gpus.values() if own.uuid and own.uuid in takers},
        numbers={own.index: numbers[own.uuid] for own in gpus.values() if own.uuid and own.uuid in numbers},
        again=second,
        again_gpus={gpu.index: gpu for row in again for gpu in row.gpus if gpu.to_bytes_per_s is not None},
    )


class Measured(NamedTuple):
    """One GPU's link to or from the host's memory."""

    copies: RankCopies
    gpu: int
    model: str | None
    bytes_per_s: float


def host_memory_links(all_copies: Iterable[RankCopies]) -> Iterator[tuple[bool, list[Measured]]]:
    """For each host and direction (True: to the GPU) what its GPUs reach, each once."""
    hosts = defaultdict(list)
    for copies in all_copies:
        hosts[copies.host].append(copies)
    for own in hosts.values():
        for there in (True, False):
            links: dict[object, Measured] = {}
            for copies in own:
                for index, gpu in copies.gpus.items():
                    rate = gpu.to_bytes_per_s if there else gpu.from_bytes_per_s
                    if rate is not None and rate > 0:
                        links.setdefault(gpu.uuid or (copies.rank, index), Measured(copies, index, gpu.name, rate))
            yield there, list(links.values())
