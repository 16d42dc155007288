"""P2P002's findings on wrong and slow copies between the GPUs of a host, and between GPUs and its memory.

A GPU whose links fail is named, else the failing pairs. If links between all GPUs fail, the host is blamed. A rate is
compared with the NVLinks or the PCIe switch of the pair, the other GPUs of the host, the other direction, and the copy
through the host's memory. A link is reported with the first of these that it does not reach.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from statistics import median, median_low
from typing import NamedTuple

from msgspec import Struct

from ddpdiag.checks.api import Seen
from ddpdiag.checks.gpu import devices, memory_errors
from ddpdiag.checks.gpu.cards import Card, cards_of, smi_id
from ddpdiag.checks.gpu.other_users import not_free
from ddpdiag.checks.hosts import Host, hosts_of, leave_out, names_text
from ddpdiag.checks.matrix import Link, explain, links_of
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.paths import HostPaths, Pair, host_paths
from ddpdiag.checks.rates import doubts_text, severity_of_rate
from ddpdiag.model import Finding, Severity, Trial
from ddpdiag.model.measurements import Copies, GpuCopies, PairCopies
from ddpdiag.probes.gpu.paths import Level
from ddpdiag.text import begun, count, rate_text, share_text

_GPU = re.compile(r"GPU (\d+)")
# The number of the host's memory as an end of a link. The numbers of GPUs are torch's indices.
MEMORY = -1
# The start of the name of a parameter (a rank follows) that lists the pairs and GPUs to be measured again.
AGAIN = "again."
# The most links to measure again. A slow link takes about 0.2 s.
_MOST_REPEATED = 8
# The rate that copies reach on one PCIe lane, by generation: 55 GB/s measured on 16 lanes of generation 5 (nvbandwidth,
# 88 % of what they carry), and in proportion for the others. AzNHC's limits (21 GB/s on 16 lanes of generation 4, 48 of
# 5) are 76 % and 87 % of this.
_LANE_BYTES_PER_S = {1: 0.215e9, 2: 0.43e9, 3: 0.86e9, 4: 1.72e9, 5: 3.44e9, 6: 6.88e9}
# The rate of a shorter copy is too low, because its start takes a part of the time. 64 MiB take 84 us at 800 GB/s; if
# many pairs share little time, copies are shorter. The value is an estimate, not measured on a GPU.
_LEAST_SECONDS = 50e-6
_WORD_BYTES = 4  # of each of `PairCopies.words`
# The share of the usual rate below which P2P002 calls a link slow (`slow_ratio`).
_PROOF_SHARE = 0.5
# P2P003 finds out whether NCCL works without such copies.
GUESS = "Try the job with NCCL_P2P_DISABLE=1."
ACS = (
    "As root run `lspci -vvv | grep ACSCtl`: `SrcValid+` means that ACS is on. If so, turn it off in the BIOS, and add "
    "iommu=pt to the kernel's command line."
)


class RankCopies(Struct, frozen=True, kw_only=True):
    """The copies that one rank of a host made between the GPUs that it sees. The key of a GPU is torch's index.

    `alone`: no other rank of the host sees other GPUs. `cards`: GPU003's data of these GPUs. `takers`: the ranks that
    train on each. `numbers`: NVML's indices, which differ from torch's if CUDA_VISIBLE_DEVICES is set. `rates`: bytes
    per second of all links. `again`: the second measurement of slow links. `wrong`: words that arrived wrong in either.
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
    rates: Mapping[Link, float]
    again: Mapping[Link, float]
    wrong: Mapping[Link, int]

    @property
    def in_order(self) -> list[int]:
        """The GPUs in the order of NVML's indices; GPUs without a known index come last."""
        return sorted(self.gpus, key=lambda gpu: (self.numbers.get(gpu, len(self.gpus)), gpu))

    def label(self, gpu: int) -> str:
        """The GPU in words: "GPU 2" by NVML's index; if that is not known, "GPU 0 of rank 2" or "cuda:0" by torch's."""
        if gpu == MEMORY:
            return "the host's memory"
        if gpu in self.numbers:
            return f"GPU {self.numbers[gpu]}"
        name = f"cuda:{gpu}" if self.numbers else f"GPU {gpu}"
        return name if self.alone else f"{name} of rank {self.rank}"

    def renumbered(self, step: str) -> str:
        """The text of a step with NVML's indices of GPUs instead of torch's."""
        return _GPU.sub(lambda found: self.label(int(found[1])), step) if self.numbers else step

    def full_label(self, gpu: int) -> str:
        """The GPU in words, with its UUID and PCI address."""
        own = self.gpus.get(gpu)
        known = [own.uuid or "", f"PCI {own.pci}" if own.pci else ""] if own else []
        shown = ", ".join(filter(None, known))
        return f"{self.label(gpu)}{f' ({shown})' if shown else ''}"

    def link_label(self, link: Link) -> str:
        """The link in words, such as "GPU 2 -> GPU 5"."""
        return " -> ".join(map(self.label, link))

    def uuids(self, gpus: Iterable[int]) -> tuple[str, ...]:
        """The UUIDs of these GPUs, without those that are not known."""
        return tuple(own.uuid for gpu in gpus if (own := self.gpus.get(gpu)) is not None and own.uuid)

    def ranks_of(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The ranks that are known to train on these GPUs."""
        return tuple(sorted({rank for gpu in gpus for rank in self.takers.get(gpu, ())}))

    def rates_between(self, *, access: bool) -> dict[Link, float]:
        """Rates of the pairs with peer access if `access`, else of those without it."""
        links = (link for link, pair in self.pairs.items() if pair.access is access)
        return {link: self.rates[link] for link in links if link in self.rates}


def copies_by_rank(seen: Seen[Copies]) -> list[RankCopies]:
    """The copies of each rank that made any, in the order of hosts."""
    first = {row.place.rank: row.data for row in seen.rows_so_far if not is_repetition(row.trial)}
    again = {row.place.rank: row.data for row in seen.rows_so_far if is_repetition(row.trial)}
    cards = {card.health.uuid: card for card in cards_of(seen.of(memory_errors.CHECK)) if card.health.uuid is not None}
    takers = defaultdict(list)
    for rank, answer in seen.of(devices.CHECK).by_rank.items():
        if answer.gpu is not None and answer.gpu.uuid:
            takers[answer.gpu.uuid].append(rank)
    numbers = {gpu.uuid: gpu.index for own in host_paths(seen.of(paths.CHECK)) for gpu in own.gpus if gpu.uuid}
    all_copies = []
    for host in hosts_of(seen):
        ranks = [rank for rank in host.ranks if rank in first]
        alone = len({frozenset(gpu.uuid for gpu in first[rank].gpus) for rank in ranks}) == 1
        for rank in ranks:
            known, repeated = first[rank], again.get(rank, Copies())
            uuids = {gpu.index: gpu.uuid for gpu in known.gpus if gpu.uuid}
            own = RankCopies(
                host=host,
                rank=rank,
                alone=alone,
                gpus={gpu.index: gpu for gpu in known.gpus},
                pairs={(pair.source, pair.target): pair for pair in known.pairs},
                done=known.done,
                jobs=known.jobs,
                refused=known.refused,
                cards={index: cards[uuid] for index, uuid in uuids.items() if uuid in cards},
                takers={index: takers[uuid] for index, uuid in uuids.items() if uuid in takers},
                numbers={index: numbers[uuid] for index, uuid in uuids.items() if uuid in numbers},
                rates=_rates(known),
                again=_rates(repeated),
                wrong=_wrong(repeated) | _wrong(known),
            )
            all_copies.append(own)
    return all_copies


def _rates(copies: Copies) -> dict[Link, float]:
    """The measured rates in bytes per second, by link."""
    rates = {(pair.source, pair.target): pair.bytes_per_s for pair in copies.pairs}
    for gpu in copies.gpus:
        rates |= {(MEMORY, gpu.index): gpu.to_bytes_per_s, (gpu.index, MEMORY): gpu.from_bytes_per_s}
    return {link: rate for link, rate in rates.items() if rate is not None and rate > 0}


def _wrong(copies: Copies) -> dict[Link, int]:
    """The number of words that arrived wrong, by link, if there are any."""
    words = {(pair.source, pair.target): pair.wrong for pair in copies.pairs}
    for gpu in copies.gpus:
        words |= {(MEMORY, gpu.index): gpu.wrong_to, (gpu.index, MEMORY): gpu.wrong_from}
    return {link: number for link, number in words.items() if number}


def is_repetition(trial: Trial) -> bool:
    """Whether the trial measures links for the second time."""
    return any(name.startswith(AGAIN) for name in trial.params)


class Subject(NamedTuple):
    """Bad links with one explanation (`where`). `gpus` are blamed: both ends of single pairs; none if all are bad."""

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
        message: str,
        evidence: Mapping[str, float | int | str],
        fix: str,
        severity: Severity | None = None,
    ) -> Finding:
        return seen.finding(
            f"host-{word}" if self.kind == "memory" else word,
            title,
            message,
            severity=severity,
            ranks=self.copies.ranks_of(self.gpus),
            hosts=(self.copies.host.name,),
            gpus=self.copies.uuids(self.gpus),
            evidence={"pairs": [self.copies.link_label(link) for link in self.links], **evidence},
            fix=fix,
        )


def subjects(copies: RankCopies, bad: Set[Link]) -> Iterator[Subject]:
    """The bad links, grouped by their explanation. A GPU's links to and from the host's memory are one group."""
    pairs = {link for link in bad if MEMORY not in link}
    pattern = explain(pairs, copies.pairs.keys() - pairs)
    for kind, gpus, links in links_of(pattern, pairs) if pattern is not None else ():
        ordered = tuple(sorted(links))
        ends = tuple(dict.fromkeys(end for link in ordered for end in link)) if kind == "links" else gpus
        yield Subject(copies, kind, ends, ordered, _where(copies, kind, gpus, ordered))
    for gpu in copies.gpus:
        if links := frozenset({(MEMORY, gpu), (gpu, MEMORY)}) & bad:
            ordered = tuple(sorted(links))
            yield Subject(copies, "memory", (gpu,), ordered, _where(copies, "memory", (gpu,), ordered))


def _where(copies: RankCopies, kind: str, gpus: tuple[int, ...], links: tuple[Link, ...]) -> str:
    name = copies.host.name
    match kind:
        case "host":
            return f"between {copies.full_label(gpus[0])} and the other GPUs of {name}"
        case "sender":
            return f"from {copies.full_label(gpus[0])} to the other GPUs of {name}"
        case "receiver":
            return f"from the other GPUs of {name} to {copies.full_label(gpus[0])}"
        case "links" | "memory":
            # A single link is shown with UUIDs and addresses. Of several links, the finding names the GPUs.
            label = copies.full_label if len(links) == 1 else copies.label
            return f"on {name}, {names_text([' -> '.join(map(label, link)) for link in links])}"
        case "islands":
            return f"between groups of GPUs on {name} ({names_text([*map(copies.link_label, links)])})"
        case _:
            return f"between all GPUs of {name}"


def wrong(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    """Findings on copies that arrive with wrong values."""
    name = copies.host.name
    for subject in subjects(copies, copies.wrong.keys()):
        words, in_memory = max(copies.wrong[link] for link in subject.links), subject.kind == "memory"
        also = sum(copies.pairs[link].wrong_through_host > 0 for link in subject.links if link in copies.pairs)
        staged = " Through the host's memory they arrive right, so peer-to-peer access is at fault."
        if also:
            staged = " Some arrive wrong through the host's memory, too, so peer-to-peer access is not the only cause."
        yield subject.finding(
            seen,
            "wrong",
            f"copies between {'a GPU and the memory' if in_memory else 'GPUs'} of {name} arrive corrupted",
            f"Copies {subject.where} arrive corrupted: up to {count(words, 'word')} of {_WORD_BYTES} bytes differ, 0 "
            f"expected.{'' if in_memory else staged}",
            {"wrong_words": words, "wrong_pairs_through_host": also},
            f"{begun(leave_out([name]))}. Test its GPUs and memory there (`dcgmi diag -r 3`, `dmesg -T`)."
            if in_memory or also
            else f"Do not train on {name} as it is. {GUESS} {ACS}",
        )


# Rates ----------------------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The rate that a link should reach, its source, and the setting that holds the least acceptable share of it.

    `proves`: a link below `far_ratio` of this rate may be an error.
    """

    bytes_per_s: float
    source: str
    setting: str
    proves: bool = False


Expectations = Iterator[tuple[Link, Expected]]


def usual_rate(rates: Mapping[Link, float]) -> float | None:
    """The rate that most GPUs reach on most of their links; None for two GPUs, which have no majority.

    The median of all links does not show it: of four GPUs, a single slow one takes part in half of the links.
    """
    ends: dict[int, list[float]] = {}
    for link, rate in rates.items():
        for end in link:
            ends.setdefault(end, []).append(rate)
    return median_low(median_low(own) for own in ends.values()) if len(ends) > 2 else None


def slot_rate(card: Card | None) -> tuple[float, str]:
    """The rate that a GPU's PCIe link should carry (0: not known), and its source.

    It follows from the current width and the highest possible generation: an idle card lowers the current one (GPU003).
    """
    link = card.health.pcie if card else None
    lane = _LANE_BYTES_PER_S.get(link.generation_max or 0) if link else None
    if link is None or lane is None or not link.width:
        return 0.0, ""
    return link.width * lane, f"PCIe {link.generation_max} x{link.width}, from nvbandwidth's 55 GB/s over PCIe 5 x16"


def _below(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> dict[Link, Expected]:
    """The links below an expected rate, each with the first expectation that it does not reach."""
    host = next((own for own in host_paths(seen.of(paths.CHECK)) if own.host.ranks == copies.host.ranks), None)
    expected = (
        *_by_path(copies, host),
        *_by_peers(copies, host),
        *_by_way_back(copies),
        *_by_staging(copies, host),
        *_by_siblings(copies, all_copies),
        *_by_slot(copies, host),
    )
    bad: dict[Link, Expected] = {}
    for link, own in expected:
        if 0 < copies.rates.get(link, 0.0) < seen.number(own.setting) * own.bytes_per_s and not _is_short(copies, link):
            bad.setdefault(link, own)
    return bad


def _is_short(copies: RankCopies, link: Link) -> bool:
    """Whether the copies of a pair were too short to measure a rate."""
    pair = copies.pairs.get(link)
    return pair is not None and 0 < pair.words * _WORD_BYTES < _LEAST_SECONDS * copies.rates[link]


def _paths(copies: RankCopies, host: HostPaths | None) -> dict[Link, Pair]:
    """P2P001's path of each link with peer access, except those that NCCL connects through the host's memory anyway."""
    pairs = [pair for pair in host.pairs if pair not in host.through_memory] if host else []
    known = {frozenset((pair.one.uuid, pair.other.uuid)): pair for pair in pairs}
    links = copies.rates_between(access=True)
    return {link: known[uuids] for link in links if (uuids := frozenset(copies.uuids(link))) in known}


def _by_path(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the NVLinks' speed that NVML reports, or that of the slots of two GPUs behind PCIe switches.

    Across a processor nothing is expected: the rate of copies depends on its model, and no figure of it is public.
    """
    for link, pair in _paths(copies, host).items():
        ends = [copies.cards.get(gpu) for gpu in link]
        if nvlinks := min((path.nvlinks or 0 for path in pair.known), default=0):
            speeds = [own.bytes_per_s for end in ends if end for own in end.health.nvlinks if own.up]
            rate, source = nvlinks * min(filter(None, speeds), default=0.0), f"{count(nvlinks, 'NVLink')}, by NVML"
        elif pair.is_unlinked and pair.level is not None and pair.level <= Level.PXB:
            rate, source = min(map(slot_rate, ends))
        else:
            continue
        if rate:
            yield link, Expected(rate, source, "far_ratio", proves=True)


def _by_peers(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the rate of most GPUs of the host on paths of the same kind (with or without peer access).

    A slow link may be an error (`proves`) if other paths of its level are fast: between sockets all may be slow.
    """
    levels = {link: pair.level for link, pair in _paths(copies, host).items()}
    for access in (True, False):
        rates = copies.rates_between(access=access)
        usual = usual_rate(rates) or 0.0
        fast = {levels[link] for link, rate in rates.items() if link in levels and rate > usual * _PROOF_SHARE}
        for link in rates:
            proves = access and link in levels and levels[link] in fast
            yield link, Expected(usual, "most GPUs of the host reach it", "slow_ratio", proves)


def _by_way_back(copies: RankCopies) -> Expectations:
    for link in copies.pairs:
        back = copies.rates.get(link[::-1], 0.0)
        yield link, Expected(back, "the same path in the other direction", "asymmetric_ratio")


def _by_staging(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the rate through the host's memory, except of pairs that NCCL connects that way anyway."""
    excluded = {frozenset((pair.one.uuid, pair.other.uuid)) for pair in (host.through_memory if host else ())}
    for link, pair in copies.pairs.items():
        if pair.access and pair.through_host_bytes_per_s and frozenset(copies.uuids(link)) not in excluded:
            rate = pair.through_host_bytes_per_s
            yield link, Expected(rate, "the same path through the host's memory", "indirect_ratio")


def _by_siblings(copies: RankCopies, all_copies: Sequence[RankCopies]) -> Expectations:
    """Expect of a link to memory the median rate of this GPU model on the host; nothing if there are only two."""
    for gpu, own_gpu in copies.gpus.items():
        for link in ((MEMORY, gpu), (gpu, MEMORY)):
            # Ranks may share a GPU.
            siblings: dict[object, float] = {}
            for others in (others for others in all_copies if others.host == copies.host):
                for index, other in others.gpus.items():
                    rate = others.rates.get((MEMORY, index) if link[0] == MEMORY else (index, MEMORY))
                    if other.name == own_gpu.name and rate:
                        siblings[other.uuid or (others.rank, index)] = rate
            if len(siblings) > 2:
                # The lower median, because all GPUs at another socket than the memory are slower.
                usual = median_low(siblings.values())
                yield link, Expected(usual, "the median of its model on the host", "host_slow_ratio", proves=True)


def _by_slot(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the rate of the GPU's PCIe slot, but nothing in a virtual machine, which shows a made-up bus."""
    if host is None or not host.around.virtual:
        for gpu in copies.gpus:
            rate, source = slot_rate(copies.cards.get(gpu))
            for link in ((MEMORY, gpu), (gpu, MEMORY)):
                yield link, Expected(rate, source, "expected_ratio")


def to_repeat(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> str:
    """The slow links to measure again, such as "0>1 1>0 3": pairs, and GPUs whose links to the host's memory are slow.

    At most `_MOST_REPEATED` are listed.
    """
    links = sorted(_below(seen, copies, all_copies))
    words = [*dict.fromkeys(str(max(link)) if MEMORY in link else f"{link[0]}>{link[1]}" for link in links)]
    return " ".join(words[:: -(-len(words) // _MOST_REPEATED) or 1])


def slow(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Findings on slow links. Links that reach the expected rate when measured again have findings of their own."""
    bad = _below(seen, copies, all_copies)
    reached = {
        link for link, own in bad.items() if copies.again.get(link, 0.0) >= seen.number(own.setting) * own.bytes_per_s
    }
    for links in (bad.keys() - reached, reached):
        for subject in subjects(copies, links):
            yield _slow_finding(seen, subject, {link: bad[link] for link in subject.links})


def _slow_finding(seen: Seen[Copies], subject: Subject, bad: Mapping[Link, Expected]) -> Finding:
    copies, name, in_memory = subject.copies, subject.copies.host.name, subject.kind == "memory"
    rate, expected = median(copies.rates[link] for link in bad), min(bad.values())
    ratio = max(seen.number(own.setting) for own in bad.values())
    shares = [median(copies.rates[link] / own.bytes_per_s for link, own in bad.items())]
    again = [copies.again[link] for link in bad if link in copies.again]
    if again:
        shares.append(median(copies.again[link] / own.bytes_per_s for link, own in bad.items() if link in copies.again))
    proves = all(own.proves for own in bad.values())
    doubts = []
    if proves and shares[0] < seen.number("far_ratio"):
        doubts = [] if again else ["it was measured once only"]
        doubts += not_free(seen, copies.uuids(dict.fromkeys(end for link in subject.links for end in link)))
    severity = severity_of_rate(
        shares, least=ratio, error_below=seen.number("far_ratio") if proves else 0.0, doubts=doubts
    )
    # Which GPUs are close to each other depends on how the host is built.
    groups = subject.kind == "islands" and expected.setting == "slow_ratio"
    if groups:
        severity = Severity.NOTE
    staged = [each for link in bad if link in copies.pairs and (each := copies.pairs[link].through_host_bytes_per_s)]
    is_faster = bool(staged) and median(staged) * seen.number("indirect_ratio") > rate
    is_staged_shown = staged and expected.setting != "indirect_ratio"
    return subject.finding(
        seen,
        "slow",
        f"slow copies between {'a GPU and the memory' if in_memory else 'GPUs'} of {name}: {rate_text(rate)}",
        f"Copies {subject.where} reach {rate_text(rate)}{_median_text(subject.links)}"
        f"{f'; {rate_text(median(again))} when measured again' if again else ''}. At least "
        f"{share_text(ratio)} of {rate_text(expected.bytes_per_s)} is expected ({expected.source})."
        f"{f' Through the host they reach {rate_text(median(staged))}.' if is_staged_shown else ''}"
        f"{' Sockets and NVLink bridges form such groups; this may be intended.' if groups else ''}"
        f"{doubts_text(doubts) if severity is Severity.WARNING else ''}",
        {
            "bytes_per_s": rate,
            "expected_bytes_per_s": expected.bytes_per_s,
            "source": expected.source,
            **({"again_bytes_per_s": median(again)} if again else {}),
            **({"doubts": "; ".join(doubts)} if doubts else {}),
        },
        _slow_fix(subject, is_intended=groups, is_faster=is_faster),
        severity,
    )


def _median_text(links: Sequence[Link]) -> str:
    return f" (medians of {len(links)} links)" if len(links) > 1 else ""


def _slow_fix(subject: Subject, *, is_intended: bool, is_faster: bool) -> str:
    name = subject.copies.host.name
    if is_intended:
        return "Nothing to do if this is intended (`nvidia-smi topo -m` shows how the GPUs are connected)."
    if subject.kind == "memory":
        own = subject.copies.gpus[subject.gpus[0]]
        return (
            f"Compare `nvidia-smi -q -d PCIE -i {smi_id(own.uuid, own.pci)}` on {name} under load and `nvidia-smi topo "
            f"-m` with another GPU. Reboot {name}; if the GPU stays slow, have the card reseated."
        )
    return (
        f"{f'{GUESS} {ACS} ' if is_faster else ''}On {name} run `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e` (a "
        "link is down, or has errors), `nvidia-smi topo -m` (GPUs on different sockets) and `nvidia-smi -q -d "
        "PERFORMANCE,PCIE` under load (fewer lanes, replays), and compare with a host that passes. Reset the GPUs as "
        "root, or reboot; then have the riser and the PCIe switch there checked."
    )
