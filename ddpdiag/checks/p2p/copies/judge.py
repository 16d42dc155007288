"""The GPUs of one host and the copies between them, and the findings about wrong and slow copies.

A GPU whose links fail is named, and else the pairs; where links between all GPUs fail, the host is blamed. A rate is
held against the NVLinks or the PCIe switch of the pair, the other GPUs of the host, the other direction, and the copy
through the host's memory; a link is reported for the first of these that it is below.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from statistics import median, median_low
from typing import NamedTuple

from msgspec import Struct, structs

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Card, cards_of, smi_id
from ddpdiag.checks.gpu.other_users import not_free
from ddpdiag.checks.hosts import Host, hosts_of, leave_out, names_text
from ddpdiag.checks.matrix import Link, explain, links_of
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.host_paths import Pair, host_paths
from ddpdiag.checks.rates import doubts_text, severity_of_rate
from ddpdiag.model import Finding, Severity, Trial
from ddpdiag.model.measurements import Copies, GpuCopies, PairCopies
from ddpdiag.probes.gpu.paths import Level
from ddpdiag.text import begun, count, rate_text, share_text

_GPU = re.compile(r"GPU (\d+)")
# The parameter of a trial, with the rank behind it, that lists the pairs and GPUs to be measured once more.
AGAIN = "again."
# Each takes some 0.2 s where it is slow.
_MOST_REPEATED = 8
# GB/s of one lane that copies reach, by generation: 55 GB/s measured on 16 lanes of generation 5 (nvbandwidth, 88 % of
# what they carry), and in proportion for the others. AzNHC's limits (21 GB/s on 16 lanes of generation 4, 48 of 5) are
# 76 % and 87 % of this.
_LANE_BYTES_PER_S = {1: 0.215e9, 2: 0.43e9, 3: 0.86e9, 4: 1.72e9, 5: 3.44e9, 6: 6.88e9}
# A copy that takes less shows its start as much as its bytes: its rate is too low. 64 MiB take 84 us at 800 GB/s; where
# many pairs share little time, copies are shorter. Chosen here, and not measured on a GPU.
_LEAST_SECONDS = 50e-6
_WORD_BYTES = 4  # those of `words`
# Half of what most GPUs reach is what P2P002 calls slow.
_PROOF_SHARE = 0.5
# P2P003 finds out whether NCCL works without such copies.
GUESS = "Try the job with NCCL_P2P_DISABLE=1."
ACS = (
    "As root run `lspci -vvv | grep ACSCtl`: `SrcValid+` means that ACS is on. If so, turn it off in the BIOS, and add "
    "iommu=pt to the kernel's command line."
)


class RankCopies(Struct, frozen=True, kw_only=True):
    """The copies of one rank of a host between the GPUs that it sees, by torch's index.

    `alone`: no other rank of the host sees other GPUs. `cards` are GPU003's data of these GPUs, `takers` the ranks that
    train on them. `numbers` are those of NVML, which differ from torch's where CUDA_VISIBLE_DEVICES is set. `again` and
    `again_gpus` are the second measurement of pairs and links to the host that were far below what is expected.
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
    """Whether pairs were measured a second time in it."""
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


class Subject(NamedTuple):
    """Links that fail together: the GPUs to blame (of single pairs both ends; of all, none), and in words."""

    copies: RankCopies
    kind: str
    gpus: tuple[int, ...]
    links: tuple[Link, ...]
    where: str

    def finding(
        self,
        seen: Seen[Copies],
        word: str,
        title: str,
        said: str,
        evidence: Mapping[str, float | int | str],
        fix: str,
        severity: Severity | None = None,
    ) -> Finding:
        return seen.finding(
            word,
            title,
            said,
            severity=severity,
            ranks=self.copies.ranks_of(self.gpus),
            hosts=(self.copies.host.name,),
            gpus=self.copies.uuids(self.gpus),
            evidence={"pairs": [self.copies.link_label(link) for link in self.links], **evidence},
            fix=fix,
        )


def subjects(copies: RankCopies, bad: Set[Link], good: Set[Link]) -> Iterator[Subject]:
    """Each thing that explains some of the failing links."""
    pattern = explain(bad, good - bad)
    for kind, gpus, links in links_of(pattern, bad) if pattern is not None else ():
        ordered = tuple(sorted(links))
        ends = tuple(dict.fromkeys(end for link in ordered for end in link)) if kind == "links" else gpus
        yield Subject(copies, kind, ends, ordered, _where(copies, kind, gpus, ordered))


def _where(copies: RankCopies, kind: str, gpus: tuple[int, ...], links: tuple[Link, ...]) -> str:
    name = copies.host.name
    match kind:
        case "host":
            return f"between {copies.full_label(gpus[0])} and the other GPUs of {name}"
        case "sender":
            return f"from {copies.full_label(gpus[0])} to the other GPUs of {name}"
        case "receiver":
            return f"from the other GPUs of {name} to {copies.full_label(gpus[0])}"
        case "links":
            return f"on {name}, {_links(copies, links)}"
        case "islands":
            return f"between groups of GPUs on {name} ({names_text([*map(copies.link_label, links)])})"
        case _:
            return f"between all GPUs of {name}"


# Contents -------------------------------------------------------------------------------------------------------------


def wrong(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    """Copies that arrive with other contents, however fast they are."""
    bad = {link for link, pair in copies.pairs.items() if pair.wrong}
    for subject in subjects(copies, bad, copies.pairs.keys()):
        pairs = [copies.pairs[link] for link in subject.links]
        most = max(pairs, key=lambda pair: pair.wrong)
        also = sum(pair.wrong_through_host > 0 for pair in pairs)
        whose = "they" if also == len(pairs) else f"those of {count(also, 'pair')}"
        through_host = (
            f"{whose} arrive wrong as well, so peer-to-peer access is not the only cause"
            if also
            else "they arrive right, so peer-to-peer access is at fault"
        )
        yield subject.finding(
            seen,
            "wrong",
            f"copies between GPUs of {copies.host.name} arrive corrupted",
            f"Copies {subject.where} arrive corrupted: up to {most.wrong:,} of {most.words:,} words of {_WORD_BYTES} "
            f"bytes differ, 0 expected. Through the host's memory {through_host}.",
            {"wrong_words": most.wrong, "words": most.words, "wrong_pairs_through_host": also},
            (
                f"{begun(leave_out([copies.host.name]))}. Test its GPUs and memory there (`dcgmi diag -r 3`, `dmesg "
                "-T`)."
                if also
                else f"Do not train on {copies.host.name} as it is. {GUESS} {ACS}"
            ),
        )


def _median_text(links: Collection[Link]) -> str:
    return f" (medians of {len(links)} pairs)" if len(links) > 1 else ""


def _links(copies: RankCopies, links: Sequence[Link]) -> str:
    """With UUID and address where there is one link; the finding names the GPUs."""
    names = [" -> ".join(map(copies.full_label if len(links) == 1 else copies.label, link)) for link in links]
    return names_text(names)


def host_wrong(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    """Copies from or to the host's memory that arrive with other contents."""
    for index, gpu in copies.gpus.items():
        for words, link in ((gpu.wrong_to, "to"), (gpu.wrong_from, "from")):
            if words:
                yield seen.finding(
                    "host-wrong",
                    f"copies {'from the host to a GPU' if link == 'to' else 'from a GPU to the host'} arrive corrupted",
                    f"Copies {link} {copies.full_label(index)} on {copies.host.name} changed {count(words, 'word')} of "
                    f"{_WORD_BYTES} bytes; 0 expected.",
                    ranks=copies.ranks_of((index,)),
                    hosts=(copies.host.name,),
                    gpus=copies.uuids((index,)),
                    evidence={"wrong_words": words},
                    fix=f"{begun(leave_out([copies.host.name]))}. Test its GPUs and memory there (`dcgmi diag -r 3`, "
                    "`dmesg -T`).",
                )


# Rates ----------------------------------------------------------------------------------------------------------------


def rates_by_access(copies: RankCopies, *, access: bool) -> dict[Link, float]:
    """Rates of the pairs with peer access, or of those without."""
    return {link: pair.bytes_per_s for link, pair in copies.pairs.items() if pair.access is access and pair.bytes_per_s}


def too_short(copies: RankCopies) -> set[Link]:
    """Pairs whose copies were too short for a rate."""
    timed = {link: pair for link, pair in copies.pairs.items() if pair.words and pair.bytes_per_s}
    return {link for link, pair in timed.items() if pair.words * _WORD_BYTES < _LEAST_SECONDS * (pair.bytes_per_s or 0)}


def usual_rate(rates: Mapping[Link, float]) -> float | None:
    """The rate of most GPUs on most of their links; None for two GPUs, of which neither is usual.

    Not the median of all links: of four GPUs, one that is slow has its part in half of them.
    """
    ends: dict[int, list[float]] = {}
    for link, rate in rates.items():
        for end in link:
            ends.setdefault(end, []).append(rate)
    return median_low(median_low(own) for own in ends.values()) if len(ends) > 2 else None


def siblings_rate(own: Measured, links: Sequence[Measured]) -> float:
    """The median rate of GPUs of its model on the host; 0 for two, of which neither is usual."""
    siblings = [other.bytes_per_s for other in links if other.model == own.model]
    # Of an even split the lower half: behind another socket than the memory all are slower.
    return median_low(siblings) if len(siblings) > 2 else 0.0


def slot_rate(card: Card | None) -> tuple[float, str]:
    """The rate that a GPU's PCIe link should carry (0: not known), and its source.

    By the width as it is and the generation that is possible, which a card that is idle lets fall (GPU003).
    """
    link = card.health.pcie if card else None
    lane = _LANE_BYTES_PER_S.get(link.generation_max or 0) if link else None
    if link is None or lane is None or not link.width:
        return 0.0, ""
    shown = f"PCIe {link.generation_max} x{link.width}"
    return link.width * lane, f"copies over {shown} reach (from nvbandwidth's 55 GB/s over PCIe 5 x16)"


class Expected(NamedTuple):
    """The rate that a link should reach, its source, and the setting with the least share of it.

    `proves`: a share below `far_ratio` may be an error.
    """

    bytes_per_s: float
    source: str
    setting: str
    proves: bool = False


def to_repeat(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> str:
    """The links to measure once more, such as "0>1 1>0 3".

    These are pairs that are far below, and GPUs whose links to the host are; or as many as there is time for.
    """
    least, short = seen.number("far_ratio"), too_short(copies)
    pairs = {
        link
        for expected in (_by_path(seen, copies), _by_peers(seen, copies))
        for link, own in expected.items()
        if own.proves and link not in short and 0 < _rate(copies, link) < least * own.bytes_per_s
    }
    gpus = {
        own.gpu
        for _, links in host_memory_links(all_copies)
        for own in links
        if own.copies.rank == copies.rank and own.bytes_per_s < least * siblings_rate(own, links)
    }
    words = [*(f"{source}>{target}" for source, target in sorted(pairs)), *map(str, sorted(gpus))]
    return " ".join(words[:: -(-len(words) // _MOST_REPEATED) or 1])


def slow(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    """Pairs below what is expected of them; each for the first expectation that it does not reach."""
    known = too_short(copies)
    for word, *expectations in (
        ("slow", _by_path(seen, copies), _by_peers(seen, copies)),
        ("asymmetric", _by_way_back(copies)),
        ("p2p-slower", _by_host(seen, copies)),
    ):
        bad: dict[Link, Expected] = {}
        for link, own in chain.from_iterable(expected.items() for expected in expectations):
            if link not in known and 0 < _rate(copies, link) < seen.number(own.setting) * own.bytes_per_s:
                bad.setdefault(link, own)
        for subject in subjects(copies, bad.keys(), set().union(*expectations)):
            yield _slow_finding(seen, word, subject, {link: bad[link] for link in subject.links})
        known |= bad.keys()


def _rate(copies: RankCopies, link: Link) -> float:
    return copies.pairs[link].bytes_per_s or 0.0


def _paths(seen: Seen[Copies], copies: RankCopies) -> dict[Link, Pair]:
    """P2P001's paths of the pairs with peer access, but for those where NCCL uses the host's memory by itself."""
    pairs = {
        frozenset(filter(None, (pair.one.uuid, pair.other.uuid))): pair
        for host in host_paths(seen.of(paths.CHECK))
        if host.host.ranks == copies.host.ranks
        for pair in host.pairs
        if pair not in host.through_memory
    }
    links = rates_by_access(copies, access=True)
    return {link: pair for link in links if (pair := pairs.get(frozenset(copies.uuids(link)))) is not None}


def _by_path(seen: Seen[Copies], copies: RankCopies) -> dict[Link, Expected]:
    """NVLinks by the speed that NVML reports, or the slots of two GPUs behind PCIe switches.

    Across a processor the rate of copies depends on its model, and no figure of it is public.
    """
    found: dict[Link, Expected] = {}
    for link, pair in _paths(seen, copies).items():
        ends = [copies.cards.get(gpu) for gpu in link]
        nvlinks = min((path.nvlinks or 0 for path in pair.known), default=0)
        if nvlinks:
            speeds = [own.bytes_per_s for end in ends if end for own in end.health.nvlinks if own.up]
            rate, source = nvlinks * min(filter(None, speeds), default=0.0), f"{count(nvlinks, 'NVLink')}, by NVML"
        elif pair.is_unlinked and pair.level is not None and pair.level <= Level.PXB:
            rate, source = min(map(slot_rate, ends))
        else:
            continue
        if rate:
            found[link] = Expected(rate, source, "far_ratio", proves=True)
    return found


def _by_peers(seen: Seen[Copies], copies: RankCopies) -> dict[Link, Expected]:
    """The rate of most GPUs of the host on paths of the same kind (with or without peer access).

    It proves something of paths of a level on which others are fast: between sockets all may be slow.
    """
    found: dict[Link, Expected] = {}
    levels = {link: pair.level for link, pair in _paths(seen, copies).items()}
    for access in (True, False):
        rates = rates_by_access(copies, access=access)
        usual = usual_rate(rates) or 0.0
        fast = {levels[link] for link, rate in rates.items() if link in levels and rate > usual * _PROOF_SHARE}
        for link in rates if usual else ():
            proves = access and link in levels and levels[link] in fast
            found[link] = Expected(usual, "most GPUs of the host reach it", "slow_ratio", proves)
    return found


def _by_way_back(copies: RankCopies) -> dict[Link, Expected]:
    back = {(a, b): _rate(copies, (b, a)) for a, b in copies.pairs if (b, a) in copies.pairs}
    return {
        link: Expected(rate, "the same path in the other direction", "asymmetric_ratio")
        for link, rate in back.items()
        if copies.pairs[link].bytes_per_s is not None
    }


def _by_host(seen: Seen[Copies], copies: RankCopies) -> dict[Link, Expected]:
    """The copy through the host's memory; NCCL uses that by itself where it is left out."""
    hosts = [host for host in host_paths(seen.of(paths.CHECK)) if host.host.ranks == copies.host.ranks]
    spared = {frozenset((pair.one.uuid, pair.other.uuid)) for host in hosts for pair in host.through_memory}
    return {
        link: Expected(pair.through_host_bytes_per_s, "the same path through the host's memory", "indirect_ratio")
        for link, pair in copies.pairs.items()
        if pair.access and pair.through_host_bytes_per_s and frozenset(copies.uuids(link)) not in spared
    }


_TITLES = {
    "slow": "slow copies between GPUs of {}: {}",
    "asymmetric": "copies between GPUs of {} are slower in one direction: {}",
    "p2p-slower": "direct copies between GPUs of {} are slower than copies through the host's memory: {}",
}


def _slow_finding(seen: Seen[Copies], word: str, subject: Subject, bad: Mapping[Link, Expected]) -> Finding:
    copies, name = subject.copies, subject.copies.host.name
    again = {link: rate for link in bad if link in copies.again and (rate := copies.again[link].bytes_per_s)}
    rate, expected = median(_rate(copies, link) for link in bad), min(bad.values())
    shares = [_rate(copies, link) / own.bytes_per_s for link, own in bad.items()]
    second = [each / bad[link].bytes_per_s for link, each in again.items()]
    proves = all(own.proves for own in bad.values())
    is_far = proves and median(shares) < seen.number("far_ratio")
    doubts = [*_doubts(seen, subject, expected)] if is_far else []
    ratio = max(seen.number(own.setting) for own in bad.values())
    severity = severity_of_rate(
        [median(shares), *([median(second)] if second else ())],
        least=ratio,
        error_below=seen.number("far_ratio") if proves else 0.0,
        doubts=doubts,
    )
    # Which GPUs are close to each other depends on how the host is built.
    groups = subject.kind == "islands" and expected.setting == "slow_ratio"
    around = [each for link in bad if (each := copies.pairs[link].through_host_bytes_per_s)]
    faster = bool(around) and median(around) * seen.number("indirect_ratio") > rate
    if groups:
        severity = Severity.NOTE
    return subject.finding(
        seen,
        word,
        _TITLES[word].format(name, rate_text(rate)),
        f"Copies {subject.where} reach {rate_text(rate)}{_median_text(subject.links)}"
        f"{f'; {rate_text(median(again.values()))} when measured again' if again else ''}. At least "
        f"{share_text(ratio)} of {rate_text(expected.bytes_per_s)} is expected ({expected.source})."
        f"{f' Through the host they reach {rate_text(median(around))}.' if around and word == 'slow' else ''}"
        f"{' Sockets and NVLink bridges form such groups; this may be intended.' if groups else ''}"
        f"{doubts_text(doubts) if severity is Severity.WARNING else ''}",
        {
            "bytes_per_s": rate,
            "expected_bytes_per_s": expected.bytes_per_s,
            "source": expected.source,
            **({"again_bytes_per_s": median(again.values())} if again else {}),
            **({"doubts": "; ".join(doubts)} if doubts else {}),
        },
        "Nothing to do if this is intended (`nvidia-smi topo -m` shows how the GPUs are connected)."
        if groups
        else f"{GUESS} {ACS}"
        if word == "p2p-slower"
        else f"{f'{GUESS} ' if faster else ''}On {name} run `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e` (a link "
        "is down, or has errors), `nvidia-smi topo -m` (GPUs on different sockets) and `nvidia-smi -q -d "
        "PERFORMANCE,PCIE` under load (fewer lanes, replays), and compare with a host that passes. Reset the GPUs as "
        "root, or reboot; then have the riser and the PCIe switch there checked.",
        severity,
    )


def _doubts(seen: Seen[Copies], subject: Subject, expected: Expected) -> Iterator[str]:
    """Reasons for a warning instead of an error."""
    copies = subject.copies
    if not any(link in copies.again for link in subject.links):
        yield "it was measured once only"
    yield from not_free(seen, copies.uuids(dict.fromkeys(end for link in subject.links for end in link)))


def host_slow(seen: Seen[Copies], all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """GPUs below others of their model on the host, or far below their slot; each GPU and direction once."""
    # A virtual machine shows the generation of a made-up bus, not that of the host's slot.
    guests = {own.host.ranks for own in host_paths(seen.of(paths.CHECK)) if own.around.virtual}
    for there, links in host_memory_links(all_copies):
        for own in links:
            usual = siblings_rate(own, links)
            slot, source = slot_rate(own.copies.cards.get(own.gpu))
            again = own.copies.again_gpus.get(own.gpu)
            second = (again.to_bytes_per_s if there else again.from_bytes_per_s) if again is not None else None
            if own.bytes_per_s < seen.number("host_slow_ratio") * usual:
                peers = Expected(usual, "GPUs of its model there reach in the median", "host_slow_ratio", proves=True)
                yield _host_slow(seen, own, there, second, peers)
            elif own.bytes_per_s < seen.number("expected_ratio") * slot and own.copies.host.ranks not in guests:
                yield _host_slow(seen, own, there, second, Expected(slot, source, "expected_ratio"))


def _host_slow(seen: Seen[Copies], own: Measured, there: bool, second: float | None, expected: Expected) -> Finding:
    copies, name = own.copies, own.copies.host.name
    shares = [rate / expected.bytes_per_s for rate in (own.bytes_per_s, second) if rate is not None]
    severity = severity_of_rate(
        shares,
        least=seen.number(expected.setting),
        error_below=seen.number("far_ratio") if expected.proves else 0.0,
        doubts=[*not_free(seen, copies.uuids((own.gpu,)))],
    )
    card = copies.cards.get(own.gpu)
    link = card.health.pcie if card else None
    causes = (
        "Possible causes: fewer lanes or a lower generation under load, another socket's memory, an IOMMU, a busy host."
    )
    if link is not None and link.width and link.width_max and link.width < link.width_max:
        causes = f"Its link has {link.width} of {link.width_max} lanes (GPU004)."
    again = f" ({rate_text(second)} when measured again)" if second is not None else ""
    return seen.finding(
        "host-slow",
        f"slow copies {'to' if there else 'from'} a GPU of {name}: {rate_text(own.bytes_per_s)}",
        f"Copies from {'the host' if there else copies.full_label(own.gpu)} to "
        f"{copies.full_label(own.gpu) if there else 'the host'} on {name} reach {rate_text(own.bytes_per_s)}{again}, "
        f"{share_text(shares[0])} of the {rate_text(expected.bytes_per_s)} that {expected.source}. {causes}",
        severity=severity,
        ranks=copies.ranks_of((own.gpu,)),
        hosts=(name,),
        gpus=copies.uuids((own.gpu,)),
        evidence={
            "bytes_per_s": own.bytes_per_s,
            "expected_bytes_per_s": expected.bytes_per_s,
            "source": expected.source,
            "to_device": there,
        },
        fix=f"Compare `nvidia-smi -q -d PCIE -i {copies.smi_id(own.gpu)}` on {name} under load and `nvidia-smi topo "
        f"-m` with another GPU. Reboot {name}; if the GPU stays slow, have the card reseated.",
    )
