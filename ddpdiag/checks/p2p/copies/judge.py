"""P2P002's findings on wrong and slow copies between the GPUs of a host, and between GPUs and its memory.

A link is a pair (source, target) of GPUs, or of a GPU and the host's memory (`HOST_MEMORY`). If most links of a GPU are
bad, the GPU is named, else the pairs. If the links between all GPUs are bad, the host is blamed. The rate of a link is
compared with several expectations: the NVLinks or the PCIe switch of the pair, the other GPUs of the host, the other
direction, and the copy through the host's memory. A slow link is reported with the first expectation that it misses.
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
from ddpdiag.checks.gpu.other_users import not_free_reasons
from ddpdiag.checks.hosts import Host, hosts_of, leave_out, names_text
from ddpdiag.checks.matrix import Link, blamed_subjects, find_pattern
from ddpdiag.checks.p2p import paths
from ddpdiag.checks.p2p.paths import HostPaths, Pair, host_paths
from ddpdiag.checks.rates import doubts_text, severity_of_rate
from ddpdiag.model import Finding, Severity, Trial
from ddpdiag.model.measurements import Copies, GpuCopies, PairCopies
from ddpdiag.probes.gpu.paths import Level
from ddpdiag.text import begun, count, rate_text, share_text

_GPU = re.compile(r"GPU (\d+)")
# The host's memory as an end of a link. GPUs are ends by torch's indices.
HOST_MEMORY = -1
# Parameters of a repetition are named "again.RANK", and list the links that the rank measures again.
REPEAT_PREFIX = "again."
# The most links to measure again. A slow link takes about 0.2 s.
_MAX_REPEATED = 8
# The rate that copies reach on one PCIe lane, by generation. On 16 lanes of generation 5, nvbandwidth measured 55 GB/s,
# 88 % of their nominal rate; other generations are in proportion. The limits of AzNHC (21 GB/s on 16 lanes of
# generation 4, 48 GB/s of generation 5) are 76 % and 87 % of this.
_LANE_BYTES_PER_S = {1: 0.215e9, 2: 0.43e9, 3: 0.86e9, 4: 1.72e9, 5: 3.44e9, 6: 6.88e9}
# The rate of a copy that takes less time is too low, because its start takes a part of the time. 64 MiB take 84 us at
# 800 GB/s, but if many pairs share little time, copies are smaller. The value is an estimate, not measured on a GPU.
_MIN_COPY_SECONDS = 50e-6
_WORD_BYTES = 4  # of each of `PairCopies.words`
# A link above this share of `majority_rate` shows that paths of its level are fast. The default of `slow_ratio`.
_FAST_SHARE = 0.5
NO_P2P_FIX = "Try the job with NCCL_P2P_DISABLE=1."
ACS_FIX = (
    "As root run `lspci -vvv | grep ACSCtl`: `SrcValid+` means that ACS is on. If so, turn it off in the BIOS, and add "
    "iommu=pt to the kernel's command line."
)


class RankCopies(Struct, frozen=True, kw_only=True):
    """The copies that one rank of a host made between the GPUs that it sees. The key of a GPU is torch's index.

    `sees_all_gpus`: all measuring ranks of the host see the same GPUs. `refused`: pairs for which CUDA had no peer
    mappings left. `cards`: GPU003's data. `ranks_by_gpu`: the ranks that train on a GPU. `nvml_indices` may differ from
    torch's if CUDA_VISIBLE_DEVICES is set. `rates`: bytes/s of all links. `new_rates`: bytes/s of the slow links that
    were measured again. `wrong_words`: the number of wrong words in a copy, for each link that had any.
    """

    host: Host
    rank: int
    sees_all_gpus: bool
    gpus: Mapping[int, GpuCopies]
    pairs: Mapping[Link, PairCopies]
    done: int
    jobs: int
    refused: tuple[Link, ...]
    cards: Mapping[int, Card]
    ranks_by_gpu: Mapping[int, Sequence[int]]
    nvml_indices: Mapping[int, int]
    rates: Mapping[Link, float]
    new_rates: Mapping[Link, float]
    wrong_words: Mapping[Link, int]

    @property
    def gpus_in_order(self) -> list[int]:
        """The GPUs (torch's indices) in the order of NVML's indices, with GPUs that NVML does not list at the end."""
        return sorted(self.gpus, key=lambda gpu: (self.nvml_indices.get(gpu, len(self.gpus)), gpu))

    def label(self, gpu: int) -> str:
        """An end of a link in words: the memory, "GPU 2" (NVML's index), or "cuda:0" or "GPU 0 of rank 2" (torch's)."""
        if gpu == HOST_MEMORY:
            return "the host's memory"
        if gpu in self.nvml_indices:
            return f"GPU {self.nvml_indices[gpu]}"
        name = f"cuda:{gpu}" if self.nvml_indices else f"GPU {gpu}"
        return name if self.sees_all_gpus else f"{name} of rank {self.rank}"

    def with_nvml_indices(self, step: str) -> str:
        """The text of a step, with torch's indices of GPUs replaced by NVML's."""
        return _GPU.sub(lambda found: self.label(int(found[1])), step) if self.nvml_indices else step

    def full_label(self, gpu: int) -> str:
        """The GPU in words, with its UUID and PCI address."""
        gpu_copies = self.gpus.get(gpu)
        details = [gpu_copies.uuid or "", f"PCI {gpu_copies.pci}" if gpu_copies.pci else ""] if gpu_copies else []
        text = ", ".join(filter(None, details))
        return f"{self.label(gpu)}{f' ({text})' if text else ''}"

    def link_label(self, link: Link) -> str:
        return " -> ".join(map(self.label, link))

    def uuids(self, gpus: Iterable[int]) -> tuple[str, ...]:
        """The UUIDs of these GPUs, as far as they are known."""
        return tuple(each.uuid for gpu in gpus if (each := self.gpus.get(gpu)) is not None and each.uuid)

    def ranks_of(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The ranks that are known to train on these GPUs."""
        return tuple(sorted({rank for gpu in gpus for rank in self.ranks_by_gpu.get(gpu, ())}))

    def rates_between(self, *, access: bool) -> dict[Link, float]:
        """Rates of the pairs with peer access if `access`, else of those without it."""
        links = (link for link, pair in self.pairs.items() if pair.access is access)
        return {link: self.rates[link] for link in links if link in self.rates}


def copies_by_rank(seen: Seen[Copies]) -> list[RankCopies]:
    """The copies of each rank that made any, sorted by host."""
    first_answers = {row.place.rank: row.data for row in seen.all_rows if not is_repetition(row.trial)}
    second_answers = {row.place.rank: row.data for row in seen.all_rows if is_repetition(row.trial)}
    cards = {card.health.uuid: card for card in cards_of(seen.of(memory_errors.CHECK)) if card.health.uuid is not None}
    ranks_by_uuid = defaultdict(list)
    for rank, answer in seen.of(devices.CHECK).by_rank.items():
        if answer.gpu is not None and answer.gpu.uuid:
            ranks_by_uuid[answer.gpu.uuid].append(rank)
    nvml_indices = {gpu.uuid: gpu.index for each in host_paths(seen.of(paths.CHECK)) for gpu in each.gpus if gpu.uuid}
    all_copies = []
    for host in hosts_of(seen):
        ranks = [rank for rank in host.ranks if rank in first_answers]
        sees_all_gpus = len({frozenset(gpu.uuid for gpu in first_answers[rank].gpus) for rank in ranks}) == 1
        for rank in ranks:
            first, second = first_answers[rank], second_answers.get(rank, Copies())
            uuids = {gpu.index: gpu.uuid for gpu in first.gpus if gpu.uuid}
            rank_copies = RankCopies(
                host=host,
                rank=rank,
                sees_all_gpus=sees_all_gpus,
                gpus={gpu.index: gpu for gpu in first.gpus},
                pairs={(pair.source, pair.target): pair for pair in first.pairs},
                done=first.done,
                jobs=first.jobs,
                refused=first.refused,
                cards={index: cards[uuid] for index, uuid in uuids.items() if uuid in cards},
                ranks_by_gpu={index: ranks_by_uuid[uuid] for index, uuid in uuids.items() if uuid in ranks_by_uuid},
                nvml_indices={index: nvml_indices[uuid] for index, uuid in uuids.items() if uuid in nvml_indices},
                rates=_rates_by_link(first),
                new_rates=_rates_by_link(second),
                wrong_words=_wrong_words_by_link(second) | _wrong_words_by_link(first),
            )
            all_copies.append(rank_copies)
    return all_copies


def _rates_by_link(copies: Copies) -> dict[Link, float]:
    rates = {(pair.source, pair.target): pair.bytes_per_s for pair in copies.pairs}
    for gpu in copies.gpus:
        rates |= {(HOST_MEMORY, gpu.index): gpu.to_bytes_per_s, (gpu.index, HOST_MEMORY): gpu.from_bytes_per_s}
    return {link: rate for link, rate in rates.items() if rate is not None and rate > 0}


def _wrong_words_by_link(copies: Copies) -> dict[Link, int]:
    words = {(pair.source, pair.target): pair.wrong for pair in copies.pairs}
    for gpu in copies.gpus:
        words |= {(HOST_MEMORY, gpu.index): gpu.wrong_to, (gpu.index, HOST_MEMORY): gpu.wrong_from}
    return {link: number for link, number in words.items() if number}


def is_repetition(trial: Trial) -> bool:
    return any(name.startswith(REPEAT_PREFIX) for name in trial.params)


class BadLinks(NamedTuple):
    """Bad links with one explanation, which become one finding. `kind` is "memory" or a kind of `blamed_subjects`.

    `gpus` are blamed: both ends of single pairs, and none if the links between all GPUs are bad. `place` is a phrase.
    """

    copies: RankCopies
    kind: str
    gpus: tuple[int, ...]
    links: tuple[Link, ...]
    place: str


def group_bad_links(copies: RankCopies, bad: Set[Link]) -> Iterator[BadLinks]:
    """Group bad links by their explanation. A GPU's links to and from the host's memory are one group."""
    pairs = {link for link in bad if HOST_MEMORY not in link}
    pattern = find_pattern(pairs, copies.pairs.keys() - pairs)
    for kind, gpus, links in blamed_subjects(pattern, pairs) if pattern is not None else ():
        ordered = tuple(sorted(links))
        ends = tuple(dict.fromkeys(end for link in ordered for end in link)) if kind == "links" else gpus
        yield BadLinks(copies, kind, ends, ordered, _place_text(copies, kind, gpus, ordered))
    for gpu in copies.gpus:
        if links := frozenset({(HOST_MEMORY, gpu), (gpu, HOST_MEMORY)}) & bad:
            ordered = tuple(sorted(links))
            yield BadLinks(copies, "memory", (gpu,), ordered, _place_text(copies, "memory", (gpu,), ordered))


def _place_text(copies: RankCopies, kind: str, gpus: tuple[int, ...], links: tuple[Link, ...]) -> str:
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


def wrong_findings(seen: Seen[Copies], copies: RankCopies) -> Iterator[Finding]:
    name = copies.host.name
    for bad_links in group_bad_links(copies, copies.wrong_words.keys()):
        words, in_memory = max(copies.wrong_words[link] for link in bad_links.links), bad_links.kind == "memory"
        pairs = [copies.pairs[link] for link in bad_links.links if link in copies.pairs]
        wrong_through_host = sum(pair.wrong_through_host > 0 for pair in pairs)
        reason = " Through the host's memory they arrive right, so peer-to-peer access is at fault."
        if wrong_through_host:
            reason = " Some arrive wrong through the host's memory, too, so peer-to-peer access is not the only cause."
        yield seen.finding(
            "host-wrong" if in_memory else "wrong",
            f"copies between {'a GPU and the memory' if in_memory else 'GPUs'} of {name} arrive corrupted",
            f"Copies {bad_links.place} arrive corrupted: up to {count(words, 'word')} of {_WORD_BYTES} bytes differ, 0 "
            f"expected.{'' if in_memory else reason}",
            ranks=copies.ranks_of(bad_links.gpus),
            hosts=(name,),
            gpus=copies.uuids(bad_links.gpus),
            evidence={
                "pairs": [*map(copies.link_label, bad_links.links)],
                "wrong_words": words,
                "wrong_pairs_through_host": wrong_through_host,
            },
            fix=f"{begun(leave_out([name]))}. Test its GPUs and memory there (`dcgmi diag -r 3`, `dmesg -T`)."
            if in_memory or wrong_through_host
            else f"Do not train on {name} as it is. {NO_P2P_FIX} {ACS_FIX}",
        )


class Expectation(NamedTuple):
    """The rate that a link should reach, its source in words, and the name of the setting with the least share of it.

    A link below `far_ratio` of the rate may be an error if `may_be_error`, and else is a warning at most.
    """

    bytes_per_s: float
    source: str
    setting: str
    may_be_error: bool = False


Expectations = Iterator[tuple[Link, Expectation]]


def majority_rate(rates: Mapping[Link, float]) -> float | None:
    """The rate that most GPUs reach on most of their links; None for two GPUs, which have no majority.

    This is not the median of all links: of four GPUs, a single slow GPU takes part in half of the links.
    """
    ends: dict[int, list[float]] = {}
    for link, rate in rates.items():
        for end in link:
            ends.setdefault(end, []).append(rate)
    return median_low(median_low(end_rates) for end_rates in ends.values()) if len(ends) > 2 else None


def slot_rate(card: Card | None) -> tuple[float, str]:
    """The rate that a GPU's PCIe link should carry (0: not known), and the source of this rate in words.

    It follows from the current width and the highest generation: an idle card lowers its current generation (GPU003).
    """
    link = card.health.pcie if card else None
    lane = _LANE_BYTES_PER_S.get(link.generation_max or 0) if link else None
    if link is None or lane is None or not link.width:
        return 0.0, ""
    return link.width * lane, f"PCIe {link.generation_max} x{link.width}, from nvbandwidth's 55 GB/s over PCIe 5 x16"


def _slow_links(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> dict[Link, Expectation]:
    """The links that are slower than expected, each with the first expectation that it does not reach."""
    host = next((each for each in host_paths(seen.of(paths.CHECK)) if each.host.ranks == copies.host.ranks), None)
    expectations = (
        *_expect_by_path(copies, host),
        *_expect_by_majority(copies, host),
        *_expect_by_reverse(copies),
        *_expect_by_host_copy(copies, host),
        *_expect_by_model(copies, all_copies),
        *_expect_by_slot(copies, host),
    )
    missed: dict[Link, Expectation] = {}
    for link, expected in expectations:
        least_rate = seen.setting(expected.setting) * expected.bytes_per_s
        if 0 < copies.rates.get(link, 0.0) < least_rate and not _is_short(copies, link):
            missed.setdefault(link, expected)
    return missed


def _is_short(copies: RankCopies, link: Link) -> bool:
    """Whether the copies over the link took too little time to measure a rate."""
    pair = copies.pairs.get(link)
    return pair is not None and 0 < pair.words * _WORD_BYTES < _MIN_COPY_SECONDS * copies.rates[link]


def _peer_paths(copies: RankCopies, host: HostPaths | None) -> dict[Link, Pair]:
    """P2P001's `Pair` of each link with peer access, except pairs that NCCL always connects through host memory."""
    pairs = [pair for pair in host.pairs if pair not in host.pairs_through_memory] if host else []
    pairs_by_uuids = {frozenset((pair.one.uuid, pair.other.uuid)): pair for pair in pairs}
    links = copies.rates_between(access=True)
    return {link: pairs_by_uuids[uuids] for link in links if (uuids := frozenset(copies.uuids(link))) in pairs_by_uuids}


def _expect_by_path(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the speed of the pair's NVLinks, or of the slower PCIe slot if only PCIe switches join the GPUs.

    For paths through a processor nothing is expected: the rate depends on the processor's model and is not published.
    """
    for link, pair in _peer_paths(copies, host).items():
        cards = [copies.cards.get(gpu) for gpu in link]
        if nvlinks := min((path.nvlinks or 0 for path in pair.known_paths), default=0):
            speeds = [nvlink.bytes_per_s for card in cards if card for nvlink in card.health.nvlinks if nvlink.up]
            rate, source = nvlinks * min(filter(None, speeds), default=0.0), f"{count(nvlinks, 'NVLink')}, by NVML"
        elif pair.is_pcie_only and pair.level is not None and pair.level <= Level.PXB:
            rate, source = min(map(slot_rate, cards))
        else:
            continue
        if rate:
            yield link, Expectation(rate, source, "far_ratio", may_be_error=True)


def _expect_by_majority(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the rate of most GPUs of the host on links of the same kind (with or without peer access).

    A slow link may be an error only if other paths of its level are fast: paths between sockets may all be slow.
    """
    levels = {link: pair.level for link, pair in _peer_paths(copies, host).items()}
    for access in (True, False):
        rates = copies.rates_between(access=access)
        majority = majority_rate(rates) or 0.0
        fast_levels = {levels[link] for link in rates.keys() & levels if rates[link] > majority * _FAST_SHARE}
        for link in rates:
            may_be_error = access and link in levels and levels[link] in fast_levels
            yield link, Expectation(majority, "most GPUs of the host reach it", "slow_ratio", may_be_error)


def _expect_by_reverse(copies: RankCopies) -> Expectations:
    for link in copies.pairs:
        reverse_rate = copies.rates.get(link[::-1], 0.0)
        yield link, Expectation(reverse_rate, "the same path in the other direction", "asymmetric_ratio")


def _expect_by_host_copy(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect the rate through the host's memory, except for pairs that NCCL always connects through this memory."""
    excluded = {frozenset((pair.one.uuid, pair.other.uuid)) for pair in (host.pairs_through_memory if host else ())}
    for link, pair in copies.pairs.items():
        if pair.access and pair.through_host_bytes_per_s and frozenset(copies.uuids(link)) not in excluded:
            rate = pair.through_host_bytes_per_s
            yield link, Expectation(rate, "the same path through the host's memory", "indirect_ratio")


def _expect_by_model(copies: RankCopies, all_copies: Sequence[RankCopies]) -> Expectations:
    """Expect, between a GPU and memory, the median rate of the GPU's model, if the host has three of it or more."""
    for gpu, own_gpu in copies.gpus.items():
        for link in ((HOST_MEMORY, gpu), (gpu, HOST_MEMORY)):
            # Ranks may share a GPU, so the rates are collected by UUID.
            rates: dict[object, float] = {}
            for others in (others for others in all_copies if others.host == copies.host):
                for index, other in others.gpus.items():
                    rate = others.rates.get((HOST_MEMORY, index) if link[0] == HOST_MEMORY else (index, HOST_MEMORY))
                    if other.name == own_gpu.name and rate:
                        rates[other.uuid or (others.rank, index)] = rate
            if len(rates) > 2:
                # The lower median, because all GPUs at another socket than the memory are slower.
                source = "the median of its model on the host"
                yield link, Expectation(median_low(rates.values()), source, "host_slow_ratio", may_be_error=True)


def _expect_by_slot(copies: RankCopies, host: HostPaths | None) -> Expectations:
    """Expect, between a GPU and memory, the rate of the PCIe slot, unless a virtual machine shows a made-up bus."""
    if host is None or not host.surroundings.virtual:
        for gpu in copies.gpus:
            rate, source = slot_rate(copies.cards.get(gpu))
            for link in ((HOST_MEMORY, gpu), (gpu, HOST_MEMORY)):
                yield link, Expectation(rate, source, "expected_ratio")


def links_to_repeat(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> str:
    """The slow links to measure again, such as "0>1 1>0 3": pairs, and GPUs whose links to the host's memory are slow.

    At most `_MAX_REPEATED` are listed, spread evenly over the slow links.
    """
    links = sorted(_slow_links(seen, copies, all_copies))
    words = [*dict.fromkeys(str(max(link)) if HOST_MEMORY in link else f"{link[0]}>{link[1]}" for link in links)]
    return " ".join(words[:: -(-len(words) // _MAX_REPEATED) or 1])


def slow_findings(seen: Seen[Copies], copies: RankCopies, all_copies: Sequence[RankCopies]) -> Iterator[Finding]:
    """Findings on slow links, and separate findings on slow links that reached the rate when measured again."""
    missed = _slow_links(seen, copies, all_copies)
    reached_again = {
        link
        for link, expected in missed.items()
        if copies.new_rates.get(link, 0.0) >= seen.setting(expected.setting) * expected.bytes_per_s
    }
    for links in (missed.keys() - reached_again, reached_again):
        for bad_links in group_bad_links(copies, links):
            yield _slow_finding(seen, bad_links, {link: missed[link] for link in bad_links.links})


def _slow_finding(seen: Seen[Copies], bad_links: BadLinks, missed: Mapping[Link, Expectation]) -> Finding:
    copies, name, in_memory = bad_links.copies, bad_links.copies.host.name, bad_links.kind == "memory"
    rate, expected, links = median(copies.rates[link] for link in missed), min(missed.values()), len(bad_links.links)
    min_share = max(seen.setting(each.setting) for each in missed.values())
    shares = [median(copies.rates[link] / each.bytes_per_s for link, each in missed.items())]
    new_rates = {link: rate for link, rate in copies.new_rates.items() if link in missed}
    if new_rates:
        shares.append(median(rate / missed[link].bytes_per_s for link, rate in new_rates.items()))
    may_be_error = all(each.may_be_error for each in missed.values())
    doubts = []
    if may_be_error and shares[0] < seen.setting("far_ratio"):
        doubts = [] if new_rates else ["it was measured once only"]
        doubts += not_free_reasons(seen, copies.uuids(dict.fromkeys(end for link in bad_links.links for end in link)))
    severity = severity_of_rate(
        shares, min_share=min_share, error_below=seen.setting("far_ratio") if may_be_error else 0.0, doubts=doubts
    )
    # Slow links between groups of GPUs may be due to the host's design, such as sockets.
    is_between_groups = bad_links.kind == "islands" and expected.setting == "slow_ratio"
    if is_between_groups:
        severity = Severity.NOTE
    pairs = [copies.pairs[link] for link in missed if link in copies.pairs]
    host_rates = [pair.through_host_bytes_per_s for pair in pairs if pair.through_host_bytes_per_s]
    host_is_faster = bool(host_rates) and median(host_rates) * seen.setting("indirect_ratio") > rate
    shows_host_rate = host_rates and expected.setting != "indirect_ratio"
    return seen.finding(
        "host-slow" if in_memory else "slow",
        f"slow copies between {'a GPU and the memory' if in_memory else 'GPUs'} of {name}: {rate_text(rate)}",
        f"Copies {bad_links.place} reach {rate_text(rate)}{f' (medians of {links} links)' if links > 1 else ''}"
        f"{f'; {rate_text(median(new_rates.values()))} when measured again' if new_rates else ''}. At least "
        f"{share_text(min_share)} of {rate_text(expected.bytes_per_s)} is expected ({expected.source})."
        f"{f' Through the host they reach {rate_text(median(host_rates))}.' if shows_host_rate else ''}"
        f"{' Sockets and NVLink bridges form such groups; this may be intended.' if is_between_groups else ''}"
        f"{doubts_text(doubts) if severity is Severity.WARNING else ''}",
        severity=severity,
        ranks=copies.ranks_of(bad_links.gpus),
        hosts=(name,),
        gpus=copies.uuids(bad_links.gpus),
        evidence={
            "pairs": [*map(copies.link_label, bad_links.links)],
            "bytes_per_s": rate,
            "expected_bytes_per_s": expected.bytes_per_s,
            "source": expected.source,
            **({"again_bytes_per_s": median(new_rates.values())} if new_rates else {}),
            **({"doubts": "; ".join(doubts)} if doubts else {}),
        },
        fix=_slow_fix(bad_links, is_intended=is_between_groups, host_is_faster=host_is_faster),
    )


def _slow_fix(bad_links: BadLinks, *, is_intended: bool, host_is_faster: bool) -> str:
    name = bad_links.copies.host.name
    if is_intended:
        return "Nothing to do if this is intended (`nvidia-smi topo -m` shows how the GPUs are connected)."
    if bad_links.kind == "memory":
        gpu = bad_links.copies.gpus[bad_links.gpus[0]]
        return (
            f"Compare `nvidia-smi -q -d PCIE -i {smi_id(gpu.uuid, gpu.pci)}` on {name} under load and `nvidia-smi topo "
            f"-m` with another GPU. Reboot {name}; if the GPU stays slow, have the card reseated."
        )
    return (
        f"{f'{NO_P2P_FIX} {ACS_FIX} ' if host_is_faster else ''}On {name} run `nvidia-smi nvlink -s` and `nvidia-smi "
        "nvlink -e` (a link is down, or has errors), `nvidia-smi topo -m` (GPUs on different sockets) and `nvidia-smi "
        "-q -d PERFORMANCE,PCIE` under load (fewer lanes, replays), and compare with a host that passes. Reset the "
        "GPUs as root, or reboot; then have the riser and the PCIe switch there checked."
    )
